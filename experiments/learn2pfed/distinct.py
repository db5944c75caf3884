"""Print the five electricity clients that differ most.

    python experiments/learn2pfed/distinct.py DATA     (needs scikit-learn)

As in Learn2pFed, t-SNE maps the clients to a plane by their load. The first client is the one farthest from the centre;
each further one is as far as possible from those before. Only the training part of each series is used, scaled as in
the experiment.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.manifold import TSNE

from equipoise.data.cache import cached
from equipoise.data.sources.electricity_files import read_loads
from equipoise.data.text_encoding import names_from_bytes

WANTED, PAST = 5, 0.8


def distinct(points: np.ndarray, wanted: int) -> list[int]:
    """Return the indices of points that are far from each other, chosen greedily."""
    chosen = [int(np.linalg.norm(points - points.mean(0), axis=1).argmax())]
    while len(chosen) < wanted:
        nearest = np.linalg.norm(points[:, None] - points[chosen], axis=2).min(1)
        chosen.append(int(nearest.argmax()))
    return chosen


def main(folder: Path) -> None:
    path = folder / "electricity.csv.gz"
    arrays = cached("electricity", [path], lambda: read_loads(path, lambda done, total: None))
    names, series = names_from_bytes(arrays["names"]), arrays["series"].astype(float)
    past = series[: int(PAST * len(series))]
    varies = np.ptp(past, axis=0) > 0
    scaled = (past[:, varies] - past[:, varies].min(0)) / np.ptp(past[:, varies], axis=0)
    points = TSNE(n_components=2, random_state=0).fit_transform(scaled.T)
    known = [name for name, keep in zip(names, varies, strict=True) if keep]
    print(", ".join(f'"{known[k]}"' for k in distinct(points, WANTED)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
