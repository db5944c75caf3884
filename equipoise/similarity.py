"""How alike two models represent samples, layer by layer: linear centred kernel alignment (CKA)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import files, randomness
from equipoise.engine.executor import BUFFERS, Model
from equipoise.engine.simulate import Simulation
from equipoise.equilibrium import layers as equilibria
from equipoise.errors import EquipoiseError
from equipoise.representation import Listener
from equipoise.state import State

_BATCH = 256
_PAIRS = 100  # of clients, where each would be compared with each


def linear_cka(x: Tensor, y: Tensor) -> float:
    """|Y'X|^2 / (|X'X| |Y'Y|) of two representations of the same samples, a row a sample, their columns centred.

    Kornblith et al., 2019, Eq. 5. NaN where a representation is the same for all samples.
    """
    x, y = (t.double() - t.double().mean(0) for t in (x, y))
    if max(x.shape[1], y.shape[1]) > len(x):  # the same in inner products of samples, of which there are fewer
        k, m = x @ x.mT, y @ y.mT
        cross, own = (k * m).sum(), k.norm() * m.norm()
    else:
        cross, own = (y.mT @ x).square().sum(), (x.mT @ x).norm() * (y.mT @ y).norm()
    return float(cross / own) if own > 0 else float("nan")


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
        files.write_json(folder / "cka.json", {**table, "layers": list(self.layers), "cka": values})


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
            local = [Model(d.who, _like(d.upload.message, shared), d.client.get(BUFFERS)) for d in done]
            what = "models after local training"
        if shared is not None:
            return Sides(local, [replace(model, vector=shared) for model in local], f"{what} and the global one")
        if run.algorithm.has_consensus:
            agreed = [model for model, _ in executor.models(run.done, jobs, "consensus") if model is not None]
            return Sides(local, agreed, f"{what} and those with the consensus in them")
        return Sides(local, None, f"{what} of two clients")
    finally:
        executor.close()


def _like(message: State, shared: Tensor) -> Tensor:
    """Of what a client sends, that which is a model."""
    found = [t for t in message.values() if t.shape == shared.shape]
    if not found:
        raise EquipoiseError("the method has no personal models, and its clients do not send whole ones either")
    return found[0]


def measure(run: Simulation, name: str, samples: int, progress: Callable[[int, int], None]) -> Similarity:
    """Clients' models of a run against the global one, on test samples of all clients.

    A client's model is its personal one or, where the method has none, what its next local training makes of the global
    one. Where there is no global model it is the personal one with what all agree on in its place; where there is
    neither, clients are compared with each other.
    """
    found = sides(run)
    x = _samples(run, samples)
    names = layers(run.task.module)
    clients = run.federation.names

    @cache
    def look(other: bool, k: int) -> list[Tensor]:
        model = (found.other or [])[k] if other else found.local[k]
        return representations(run.task.to_module(model.vector, model.buffers), x, names)

    count = len(found.local)
    if found.other is not None:
        # A global model without buffers is the same at all clients, and looked at once.
        same = all(model.vector is found.other[0].vector and model.buffers is None for model in found.other)
        pairs = [(clients[m.who], (False, k), (True, 0 if same else k)) for k, m in enumerate(found.local)]
    else:
        every = [(i, j) for i in range(count) for j in range(i)]
        chosen = sorted(randomness.generator(0, "cka pairs").permutation(len(every))[:_PAIRS])
        names_of = [clients[model.who] for model in found.local]
        pairs = [(f"{names_of[i]} {names_of[j]}", (False, i), (False, j)) for i, j in (every[k] for k in chosen)]
    if not pairs:
        raise EquipoiseError("there is one client and no global model, so that there is nothing to compare it with")
    columns = []
    for k, (_, one, two) in enumerate(pairs):
        columns.append([linear_cka(a, b) for a, b in zip(look(*one), look(*two), strict=True)])
        progress(k + 1, len(pairs))
    titles = tuple(title for title, *_ in pairs)
    return Similarity(name, run.done, found.between, len(x), tuple(names), titles, np.array(columns).T)


def _samples(run: Simulation, count: int) -> Tensor:
    """Test samples of all clients together, as many as there are up to `count`, the same for every model."""
    federation = run.federation
    every = np.concatenate([federation.test[who] for who in range(len(federation))])
    if len(every) < 2:
        raise EquipoiseError("CKA compares representations of test samples, and there are fewer than two")
    chosen = randomness.generator(0, "cka samples").permutation(every)[:count]
    return federation.gather(torch.from_numpy(np.sort(chosen)))[0]
