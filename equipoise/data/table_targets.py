"""Targets of tables: labels that are text or whole numbers, or numbers to predict."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import EquipoiseError


@dataclass(frozen=True)
class TargetRule:
    """What the targets of tables are."""

    column: str = ""
    "names of the target columns, for error messages"
    labels: bool | None = None
    "whether they are labels; None: text and whole numbers are"
    classes: tuple[str, ...] = ()
    "labels that are text, in the order of their classes; empty: all labels that occur, sorted"

    def read(self, given: Sequence[tuple[Any, Path]]) -> tuple[list[Tensor], tuple[str, ...]]:
        """Return targets as tensors, and the labels that are text in the order of their classes.

        Args:
            given: targets of all files, each with its file. Those that are tensors are returned as they are.
        """
        tables = [(y, file) for y, file in given if isinstance(y, np.ndarray)]
        texts = [(y, file) for y, file in tables if y.dtype.kind == "U"]
        if texts:
            for y, file in tables:
                if y.dtype.kind != "U":
                    raise EquipoiseError(
                        f"{file}: the column {self.column} has numbers, but that of {texts[0][1]} has text; use one of "
                        "them in all files"
                    )
            if self.labels is False:
                y, file = texts[0]
                raise EquipoiseError(
                    f"{file}: the column {self.column} has the text {str(y[0])!r}, but data.labels = false"
                )
            classes = self.classes or tuple(sorted({label for y, _ in texts for label in y.tolist()}))
            return [y if isinstance(y, Tensor) else self._codes(y, classes, file) for y, file in given], classes
        labels = self._are_labels(tables)
        return [y if isinstance(y, Tensor) else _tensor(y, labels) for y, _ in given], ()

    def _codes(self, y: np.ndarray, classes: Sequence[str], file: Path) -> Tensor:
        numbers = {label: number for number, label in enumerate(classes)}
        if unknown := sorted(set(y.tolist()) - numbers.keys()):
            raise EquipoiseError(
                f"{file}: the column {self.column} has the label {unknown[0]!r}, which is not one of data.classes: "
                f"{', '.join(classes)}"
            )
        return torch.tensor([numbers[label] for label in y.tolist()], dtype=torch.int64)

    def _are_labels(self, tables: Sequence[tuple[np.ndarray, Path]]) -> bool:
        if not tables or self.labels is False or tables[0][0].ndim > 1:
            return False
        whole = all(bool((y == np.rint(y)).all()) for y, _ in tables)
        if self.labels is None and not whole:
            return False
        for y, file in tables:
            wrong = y[(y != np.rint(y)) | (y < 0)]
            if len(wrong):
                raise EquipoiseError(
                    f"{file}: the column {self.column} has {wrong[0]:g}, but labels are 0, 1, 2 and so on, or text; if "
                    "it is a number to predict, set data.labels = false"
                )
        return True


def _tensor(y: np.ndarray, labels: bool) -> Tensor:
    return torch.from_numpy(y.astype(np.int64) if labels else y.reshape(len(y), -1).astype(np.float64))
