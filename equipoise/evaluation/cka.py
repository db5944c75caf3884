"""How alike two models represent samples, layer by layer: linear centred kernel alignment (CKA)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import randomness
from equipoise.engine.executors.base import BUFFERS, Model, without_kept
from equipoise.engine.simulation import Simulation
from equipoise.equilibrium import layers as equilibria
from equipoise.errors import EquipoiseError
from equipoise.representations import Listener
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import CKA

_BATCH = 256
_EACH = 15  # clients, where each is compared with each


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
    listener = Listener(module.eval(), names, None)
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
    listener = Listener(module.eval(), names := layers(module), None)
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


@dataclass(frozen=True)
class Sides:
    """Clients' models, and what each of them is compared with: None where they are compared with each other."""

    local: list[Model]
    other: list[Model] | None
    between: str


def sides(run: Simulation) -> Sides:
    """The models of the clients that trained, as they stand."""
    executor = run.engine.executor(run.task, run.federation, run.algorithm, run.schedule.seed)
    jobs = [run.job(who) for who in run.training]
    try:
        found = [model for model, _ in executor.models(run.done, jobs, "personal")]
        local, what = [model for model in found if model is not None], "personal models"
        shared = run.algorithm.shared(run.server)
        if not local:
            if shared is None:
                raise EquipoiseError(f"{type(run.algorithm).__name__} has neither personal models nor a global one")
            done = executor.train(run.done + 1, jobs, lambda: False)
            for d in done:
                trained = run.algorithm.trained(without_kept(d.client), d.upload.message)
                if trained is None:
                    raise EquipoiseError(f"{type(run.algorithm).__name__} has no models of clients to compare")
                local.append(Model(d.who, trained, d.client.get(BUFFERS)))
            what = "models after local training"
        if shared is not None:
            return Sides(local, [replace(model, vector=shared) for model in local], f"{what} and the global one")
        if run.algorithm.has_consensus:
            agreed = [model for model, _ in executor.models(run.done, jobs, "consensus") if model is not None]
            return Sides(local, agreed, f"{what} and those with the consensus in them")
        return Sides(local, None, f"{what} of two clients")
    finally:
        executor.close()


def measure(run: Simulation, name: str, samples: int, progress: Callable[[int, int], None]) -> Similarity:
    """Clients' models of a run against the global one, on test samples of all clients.

    A client's model is its personal one or, where the method has none, what its next local training makes of the global
    one. Where there is no global model it is the personal one with what all agree on in its place; where there is
    neither, clients are compared with each other.
    """
    found = sides(run)
    x = _samples(run, samples)
    names = heard_layers(run.task.to_module(found.local[0].vector, found.local[0].buffers), x)
    clients = [run.federation.names[model.who] for model in found.local]

    def look(model: Model) -> list[Tensor]:
        module = run.task.to_module(model.vector, model.buffers)
        return [gram(h) for h in representations(module, x, names)]

    pairs: list[str] = []
    columns: list[list[float]] = []

    def compare(title: str, one: list[Tensor], two: list[Tensor], total: int) -> None:
        pairs.append(title)
        columns.append([float((a * b).sum()) for a, b in zip(one, two, strict=True)])
        progress(len(pairs), total)

    if found.other is not None:
        # A global model without buffers is the same at all clients, and looked at once.
        same = all(model.vector is found.other[0].vector and model.buffers is None for model in found.other)
        common = look(found.other[0]) if same else []
        for title, model, other in zip(clients, found.local, found.other, strict=True):
            compare(title, look(model), common or look(other), len(clients))
    else:
        if len(clients) < 2:
            raise EquipoiseError("there is one client and no global model, so that there is nothing to compare it with")
        chosen = sorted(randomness.generator(0, "cka clients").permutation(len(clients))[:_EACH])
        seen = [look(found.local[k]) for k in chosen]
        for i, j in combinations(range(len(chosen)), 2):
            title = f"{clients[chosen[i]]} {clients[chosen[j]]}"
            compare(title, seen[i], seen[j], len(chosen) * (len(chosen) - 1) // 2)
    return Similarity(name, run.done, found.between, len(x), tuple(names), tuple(pairs), np.array(columns).T)


def _samples(run: Simulation, count: int) -> Tensor:
    """Test samples of all clients together, as many as there are up to `count`, the same for every model."""
    federation = run.federation
    every = np.concatenate([federation.test[who] for who in range(len(federation))])
    if len(every) < 2:
        raise EquipoiseError("CKA compares representations of test samples, and there are fewer than two")
    chosen = randomness.generator(0, "cka samples").permutation(every)[:count]
    return federation.gather(torch.from_numpy(np.sort(chosen)))[0]
