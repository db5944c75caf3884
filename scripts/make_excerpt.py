"""Make the excerpt of digits by writer that comes with the package, from MNIST and the labels of QMNIST.

    python scripts/make_excerpt.py FOLDER_WITH_MNIST_AND_QMNIST_LABELS

The first 60,000 rows of QMNIST's training labels correspond to MNIST's training images; their third column is the
writer. The excerpt has 80 writers, selected evenly from all writers with at least 60 digits.
"""

import sys
from pathlib import Path

import numpy as np

from equipoise.data.sources.mnist import read_idx

WRITERS, AT_LEAST = 80, 60


def main(folder: Path) -> None:
    x = read_idx(folder / "train-images-idx3-ubyte.gz")
    y = read_idx(folder / "train-labels-idx1-ubyte.gz")
    extended = read_idx(folder / "qmnist-train-labels-idx2-int.gz")[: len(y)]
    assert (extended[:, 0] == y).all(), "the rows of QMNIST do not match MNIST's"
    writers, counts = np.unique(extended[:, 2], return_counts=True)
    enough = writers[counts >= AT_LEAST]
    chosen = enough[np.linspace(0, len(enough) - 1, WRITERS).round().astype(int)]
    rows = np.flatnonzero(np.isin(extended[:, 2], chosen))
    rows = rows[np.argsort(extended[rows, 2], kind="stable")]
    target = Path(__file__).parent.parent / "equipoise" / "data" / "digits-by-writer.npz"
    np.savez_compressed(target, x=x[rows], y=y[rows], writer=extended[rows, 2].astype(np.int32))
    print(f"{len(rows)} digits of {len(chosen)} writers, {target.stat().st_size / 1e6:.2f} MB: {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
