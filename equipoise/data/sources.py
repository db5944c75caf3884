"""The registry of data sets: one line each."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equipoise.data import digits, idx
from equipoise.data.pool import Pool


@dataclass(frozen=True)
class Source:
    summary: str
    paper: str
    load: Callable[[Path], Pool]


SOURCES: dict[str, Source] = {
    "digits-by-writer": Source(
        "Handwritten digits of 80 writers, 28x28 grey, in the package: nothing to download.",
        "MNIST (LeCun et al., 1998) with the writers of QMNIST (Yadav and Bottou, 2019)",
        lambda data: digits.load_excerpt(),
    ),
    "mnist": Source(
        "Handwritten digits, 70,000 of 28x28 grey, 10 classes, in IDX files.",
        "LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998",
        lambda data: idx.load("mnist", data, "it is one of the four files of MNIST, offered by many mirrors"),
    ),
    "fashion-mnist": Source(
        "Articles of clothing, 70,000 of 28x28 grey, 10 classes, in IDX files.",
        "Xiao et al., Fashion-MNIST, 2017",
        lambda data: idx.load(
            "fashion-mnist", data, "get the four files from github.com/zalandoresearch/fashion-mnist"
        ),
    ),
}


def data_folder(given: Path | None) -> Path:
    """Where data sets are looked for: --data, else the variable EQUIPOISE_DATA, else ./data."""
    return given or Path(os.environ.get("EQUIPOISE_DATA", "data"))
