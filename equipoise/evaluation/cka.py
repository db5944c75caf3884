"""Similarity of the representations of two models, layer by layer: linear centred kernel alignment (CKA)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.equilibrium import layers as equilibria
from equipoise.representations.points import ForwardHook
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import CKA
from equipoise.torch_device import widened

_BATCH = 256


def gram(x: Tensor) -> Tensor:
    """Return the Gram matrix of the rows of x, one per sample, with centred columns and scaled to norm one.

    It is NaN if a representation is the same for all samples.
    """
    x = widened(x) - widened(x).mean(0)
    k: Tensor = x @ x.mT
    return k.div_(k.norm())


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA of two representations of the same samples.

    That is |Y'X|^2 / (|X'X| |Y'Y|) of the centred representations (Kornblith et al., 2019, Eq. 5).
    """
    return float((gram(x) * gram(y)).sum())


def layers(module: nn.Module) -> list[str]:
    """Return the names of submodules with weights of two or more axes; an equilibrium layer counts as one layer."""
    whole = [name for name, _ in equilibria(module)]
    found = []
    for name, layer in module.named_modules():
        if any(name.startswith(f"{other}.") for other in whole):
            continue
        weights = [p for p in layer.parameters(recurse=False) if p.ndim > 1]
        if name in whole or weights:
            found.append(name)
    return found


@torch.no_grad()
def representations(module: nn.Module, x: Tensor, names: Sequence[str]) -> list[Tensor]:
    """Return the outputs of each of these submodules, one row per sample."""
    hook = ForwardHook(module.eval(), names, None)
    try:
        pieces = []
        for part in x.split(_BATCH):
            module(part)
            pieces.append(hook.take())
    finally:
        hook.close()
    return [torch.cat(column) for column in zip(*pieces, strict=True)]


@torch.no_grad()
def heard_layers(module: nn.Module, x: Tensor) -> list[str]:
    """Return the names of those layers that the module calls in a forward pass.

    PyTorch's attention, for example, uses weights of layers that it never calls.
    """
    hook = ForwardHook(module.eval(), names := layers(module), None)
    try:
        module(x[:2])
        return [name for name in names if name not in hook.silent()]
    finally:
        hook.close()


@dataclass(frozen=True, repr=False)
class Similarity:
    """CKA of many pairs of models: one row per layer, one column per pair."""

    run: str
    rounds: int
    between: str
    samples: int
    layers: tuple[str, ...]
    pairs: tuple[str, ...]
    values: np.ndarray

    def __repr__(self) -> str:
        means = (f"{row['layer']} {row['mean']:.3f}" if "mean" in row else row["layer"] for row in self.rows())
        return f"Similarity({self.run}, CKA of {self.between}: {', '.join(means)})"

    def rows(self) -> list[dict[str, Any]]:
        """Return the mean, standard deviation, minimum and maximum over the pairs, for each layer."""
        found = []
        for name, row in zip(self.layers, self.values.tolist(), strict=True):
            good = [v for v in row if v == v]
            figures = {"mean": mean(good), "std": pstdev(good), "least": min(good), "most": max(good)} if good else {}
            found.append({"layer": name, **figures})
        return found

    def write(self, folder: Path) -> None:
        """Write cka.json into a run folder."""
        table = {"between": self.between, "rounds": self.rounds, "samples": self.samples, "pairs": list(self.pairs)}
        values = [[None if v != v else v for v in row] for row in self.values.tolist()]
        atomic_files.write_json(folder / CKA, {**table, "layers": list(self.layers), "cka": values})
