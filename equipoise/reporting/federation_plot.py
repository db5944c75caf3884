"""What a federation looks like: who has how much of what, in numbers and as a picture."""

from pathlib import Path
from typing import Any

import numpy as np

from equipoise.data import text_encoding
from equipoise.data.federation import SPLITS, Federation
from equipoise.evaluation.scoreboard import gini
from equipoise.storage import atomic_files

_SHOWN = 5  # clients whose samples are drawn
_SAMPLES = 8
_OUTLINED = 300
_NAMED = 40  # clients that have room for their names
_LETTERS = " .AIOUaeiorty"  # characters that have room for themselves on an axis of all of them


def owned(federation: Federation, who: int) -> np.ndarray:
    return np.concatenate([getattr(federation, split)[who] for split in SPLITS])


def label_counts(federation: Federation) -> np.ndarray | None:
    """How often each client has each label (in texts: each character as a target); None where targets are numbers."""
    if federation.classes is None:
        return None
    labels = federation.y.numpy().reshape(len(federation.y), -1)
    return np.stack(
        [
            np.bincount(labels[owned(federation, i)].ravel(), minlength=federation.classes)
            for i in range(len(federation))
        ]
    )


def total_variation(counts: np.ndarray) -> np.ndarray:
    """Each client's distance to the pooled distribution of labels, from 0 to 1."""
    own = counts / counts.sum(1, keepdims=True)
    pooled = counts.sum(0) / counts.sum()
    return np.asarray(np.abs(own - pooled).sum(1) / 2)


def numbers(federation: Federation) -> dict[str, Any]:
    """What `equipoise show` prints."""
    splits = {split: getattr(federation, split).lengths for split in SPLITS}
    sizes = np.sum(list(splits.values()), axis=0)
    found: dict[str, Any] = {
        "data": federation.title,
        "clients": len(federation),
        "unseen": len(federation.unseen),
        "samples": int(sizes.sum()),
        **{split: int(lengths.sum()) for split, lengths in splits.items()},
        "smallest client": int(sizes.min()),
        "median client": float(np.median(sizes)),
        "largest client": int(sizes.max()),
        "without test samples": int((splits["test"] == 0).sum()),
        "Gini of sizes": round(gini(sizes), 4),
    }
    counts = label_counts(federation)
    if counts is not None:
        have = (counts > 0).sum(1)
        found["labels"] = int((counts.sum(0) > 0).sum())
        found["labels a client, fewest"] = int(have.min())
        found["labels a client, mean"] = round(float(have.mean()), 2)
        found["labels a client, most"] = int(have.max())
        found["mean total-variation distance"] = round(float(total_variation(counts).mean()), 4)
    return found


def outline(federation: Federation) -> dict[str, Any]:
    """Who has how many samples of which label, for reports; of many clients, some that are spread over the list."""
    shown = np.unique(np.linspace(0, len(federation) - 1, min(_OUTLINED, len(federation))).round().astype(int))
    counts = label_counts(federation)
    return {
        "clients": len(federation),
        "names": [federation.names[i] for i in shown],
        "samples": [len(owned(federation, i)) for i in shown],
        "labels": None if counts is None else counts[shown].tolist(),
    }


def draw(federation: Federation, path: Path) -> None:
    """Clients against labels, their sizes, and samples of a few of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name or a text is a dollar
        figure = plt.figure(figsize=(14, 6), layout="constrained")
        _fill(federation, figure)
        with atomic_files.beside(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def _fill(federation: Federation, figure: Any) -> None:
    left, middle, right = np.ravel(figure.subfigures(1, 3, width_ratios=[3, 2, 3]))
    axes, counts = left.subplots(), label_counts(federation)
    if counts is None:
        _targets(federation, axes)
    else:
        shown = axes.imshow(counts / counts.sum(1, keepdims=True), aspect="auto", interpolation="nearest")
        left.colorbar(shown, ax=axes, label="part of the client's samples")
        axes.set(xlabel="label", ylabel="client")
        if federation.classes == text_encoding.SYMBOLS:
            axes.set_xticks(
                text_encoding.encode(_LETTERS).tolist(), ["space" if c == " " else c for c in _LETTERS], fontsize=7
            )
            axes.set(xlabel="next character")
    _clients(federation, axes)
    _sizes(federation, middle.subplots())
    _samples(federation, right)
    figure.suptitle(f"{federation.title}: {len(federation)} clients")


def _clients(federation: Federation, axes: Any) -> None:
    names = [f"{name} (unseen)" if name in federation.unseen else name for name in federation.names]
    if len(names) <= _NAMED:
        axes.set_yticks(range(len(names)), [name[:24] for name in names], fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _targets(federation: Federation, axes: Any) -> None:
    """Where targets are numbers: their range in each client, from the 5th to the 95th percentile, and the median."""
    y = federation.y.double().numpy().reshape(len(federation.y), -1)
    low, mid, high = np.array([np.percentile(y[owned(federation, i)], [5, 50, 95]) for i in range(len(federation))]).T
    axes.hlines(range(len(federation)), low, high, color="C0", linewidth=1)
    axes.plot(mid, range(len(federation)), ".", color="C3", markersize=3)
    axes.set(xlabel="targets: 5% to 95%, and the median", ylabel="client")


def _sizes(federation: Federation, axes: Any) -> None:
    before, edges = np.zeros(len(federation)), np.arange(len(federation) + 1) - 0.5
    for split in SPLITS:
        lengths = getattr(federation, split).lengths
        # one patch for all clients: there may be a hundred thousand
        axes.stairs(before + lengths, edges, baseline=before, orientation="horizontal", fill=True, label=split)
        before = before + lengths
    axes.set(xlabel="samples", yticks=[])
    axes.set_ylim(len(federation) - 0.5, -0.5)
    axes.legend(fontsize="small", loc="lower right")


def _samples(federation: Federation, figure: Any) -> None:
    """Training samples of clients spread over the list; where time goes on, from its beginning to its end."""
    chosen = np.unique(np.linspace(0, len(federation) - 1, _SHOWN).round().astype(int))
    images = federation.x.ndim == 4
    grid = figure.subplots(len(chosen), _SAMPLES if images else 1, squeeze=False)
    for row, who in zip(grid, chosen, strict=True):
        for axes in row:
            axes.set(xticks=[], yticks=[])
        mine = federation.train[who]
        rows = mine[np.unique(np.linspace(0, len(mine) - 1, _SAMPLES).round().astype(int))]
        if images:
            for axes, k in zip(row, rows, strict=False):
                picture = federation.x[int(k)].float().clamp(0, 1).permute(1, 2, 0).numpy()
                axes.imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=1)
                label = int(federation.y[int(k)]) if federation.classes is not None else ""
                axes.set_title(f"{label}", fontsize=7, pad=1)
        elif federation.x.is_floating_point():
            row[0].plot(federation.x[rows].double().reshape(len(rows), -1).numpy().T, linewidth=0.8)
        else:
            lines = [text_encoding.decode(federation.x[int(k)].numpy()).replace("\n", " ") for k in rows[:4]]
            row[0].text(0.01, 0.5, "\n".join(line[:72] for line in lines), family="monospace", fontsize=6, va="center")
        row[0].set_ylabel(federation.names[who][:14], fontsize=7)
