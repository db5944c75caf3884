"""How alike two models represent samples, layer by layer: linear centred kernel alignment (CKA)."""

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

_BATCH = 256


def gram(x: Tensor) -> Tensor:
    """The inner products of samples, a row of x each, their columns centred; scaled to length one.

    NaN where a representation is the same for all samples.
    """
    x = x.double() - x.double().mean(0)
    k: Tensor = x @ x.mT
    return k.div_(k.norm())


def linear_cka(x: Tensor, y: Tensor) -> float:
    """|Y'X|^2 / (|X'X| |Y'Y|) of two representations of the same samples, centred (Kornblith et al., 2019, Eq. 5)."""
    return float((gram(x) * gram(y)).sum())


def layers(module: nn.Module) -> list[str]:
    """Submodules with weights of two or more axes, in their order; an equilibrium layer is one, as a whole."""
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
    """What each of these submodules gives for each sample, a row a sample."""
    listener = ForwardHook(module.eval(), names, None)
    try:
        pieces = []
        for part in x.split(_BATCH):
            module(part)
            pieces.append(listener.take())
    finally:
        listener.close()
    return [torch.cat(column) for column in zip(*pieces, strict=True)]


@torch.no_grad()
def heard_layers(module: nn.Module, x: Tensor) -> list[str]:
    """Those layers that the module calls; PyTorch's attention, for one, uses weights of layers that it never calls."""
    listener = ForwardHook(module.eval(), names := layers(module), None)
    try:
        module(x[:2])
        return [name for name in names if name not in listener.silent()]
    finally:
        listener.close()


@dataclass(frozen=True)
class Similarity:
    """CKA of many pairs of models: a row a layer, a column a pair."""

    run: str
    rounds: int
    between: str
    samples: int
    layers: tuple[str, ...]
    pairs: tuple[str, ...]
    values: np.ndarray

    def rows(self) -> list[dict[str, Any]]:
        """For readers: each layer's mean, spread, least and most over the pairs."""
        found = []
        for name, row in zip(self.layers, self.values.tolist(), strict=True):
            good = [v for v in row if v == v]
            figures = {"mean": mean(good), "std": pstdev(good), "least": min(good), "most": max(good)} if good else {}
            found.append({"layer": name, **figures})
        return found

    def write(self, folder: Path) -> None:
        table = {"between": self.between, "rounds": self.rounds, "samples": self.samples, "pairs": list(self.pairs)}
        values = [[None if v != v else v for v in row] for row in self.values.tolist()]
        atomic_files.write_json(folder / CKA, {**table, "layers": list(self.layers), "cka": values})
