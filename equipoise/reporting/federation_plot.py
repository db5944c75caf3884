"""A picture of a federation: the labels of each client, the clients' sizes, and some samples."""

from pathlib import Path
from typing import Any

import numpy as np

from equipoise.data import text_encoding
from equipoise.data.federation import SPLITS, Federation
from equipoise.data.statistics import label_counts, owned
from equipoise.reporting.figure_files import figure_file

_SHOWN = 5  # clients whose samples are drawn
_SAMPLES = 8
_NAMED = 40  # largest number of clients whose names fit
_LETTERS = " .AIOUaeiorty"  # characters that are named on an axis of all characters


def draw(federation: Federation, path: Path) -> None:
    """Draw labels against clients, the clients' sizes, and samples of a few clients, and write the picture."""
    with figure_file(path, size=(14, 6), dpi=110) as figure:
        _fill(federation, figure)


def _fill(federation: Federation, figure: Any) -> None:
    left, middle, right = np.ravel(figure.subfigures(1, 3, width_ratios=[3, 2, 3]))
    axes, counts = left.subplots(), label_counts(federation)
    if counts is None:
        _targets(federation, axes)
    else:
        shown = axes.imshow(counts / counts.sum(1, keepdims=True), aspect="auto", interpolation="nearest")
        left.colorbar(shown, ax=axes, label="share of the client's samples")
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
    """Draw the range of numeric targets of each client, from the 5th to the 95th percentile, and the median."""
    y = federation.y.double().numpy().reshape(len(federation.y), -1)
    low, mid, high = np.array([np.percentile(y[owned(federation, i)], [5, 50, 95]) for i in range(len(federation))]).T
    axes.hlines(range(len(federation)), low, high, color="C0", linewidth=1)
    axes.plot(mid, range(len(federation)), ".", color="C3", markersize=3)
    axes.set(xlabel="targets: 5% to 95%, and the median", ylabel="client")


def _sizes(federation: Federation, axes: Any) -> None:
    before, edges = np.zeros(len(federation)), np.arange(len(federation) + 1) - 0.5
    for split in SPLITS:
        lengths = getattr(federation, split).lengths
        # one patch for all clients, because there may be a hundred thousand
        axes.stairs(before + lengths, edges, baseline=before, orientation="horizontal", fill=True, label=split)
        before = before + lengths
    axes.set(xlabel="samples", yticks=[])
    axes.set_ylim(len(federation) - 0.5, -0.5)
    axes.legend(fontsize="small", loc="lower right")


def _samples(federation: Federation, figure: Any) -> None:
    """Draw training samples of a few clients, both spread evenly over their lists (and so over time)."""
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
