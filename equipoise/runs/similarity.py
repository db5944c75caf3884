"""Comparison of the representations of a run's models by CKA."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness
from equipoise.algorithms.capabilities import HasConsensusModel, trained_model_of
from equipoise.data.federation import Federation
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.evaluation.cka import Similarity, gram, heard_layers, representations
from equipoise.executors.base import ClientModel, algorithm_state
from equipoise.runs.trained import SimulatedRun, Trained
from equipoise.training.buffers import BUFFERS

_MOST_PAIRED = 15  # clients that are compared with each other


@dataclass(frozen=True)
class Sides:
    """The clients' models, and the model that each is compared with (None: they are compared with each other)."""

    local: list[ClientModel]
    other: list[ClientModel] | None
    between: str


def sides(run: Simulation) -> Sides:
    """Return the current models of the clients that trained, and the models to compare them with."""
    executor = run.new_executor()
    jobs = [run.job(who) for who in run.training]
    try:
        found = [model for model, _ in executor.models(run.done, jobs, "personal")]
        local, what = [model for model in found if model is not None], "personal models"
        shared = run.algorithm.global_model(run.server)
        if not local:
            if shared is None:
                raise EquipoiseError(f"{type(run.algorithm).__name__} has neither personal models nor a global one")
            done = executor.train(run.done + 1, jobs, lambda: False)
            for d in done:
                trained = trained_model_of(run.algorithm, algorithm_state(d.client), d.upload.message)
                if trained is None:
                    raise EquipoiseError(f"{type(run.algorithm).__name__} has no models of clients to compare")
                local.append(ClientModel(d.who, trained, d.client.get(BUFFERS)))
            what = "models after local training"
        if shared is not None:
            return Sides(local, _shared(shared, run.global_buffers(), local), f"{what} and the global one")
        if isinstance(run.algorithm, HasConsensusModel):
            agreed = [model for model, _ in executor.models(run.done, jobs, "consensus") if model is not None]
            return Sides(local, agreed, f"{what} and consensus models")
        return Sides(local, None, f"{what} of two clients")
    finally:
        executor.close()


def _shared(vector: Tensor, buffers: Tensor | None, local: list[ClientModel]) -> list[ClientModel]:
    """Return the global model beside each client's own, with the client's buffers where they are not averaged."""
    return [replace(m, vector=vector, buffers=m.buffers if buffers is None else buffers) for m in local]


def _saved_sides(run: Trained) -> Sides:
    """Return the models of a run on disk, of which only personal and global models are known."""
    training = [who for who, name in enumerate(run.names) if name not in run.unseen]
    local = [model for who in training if (model := run.personal(who)) is not None]
    shared = run.global_vector()
    if not local or (shared is None and isinstance(run.algorithm, HasConsensusModel)):
        raise EquipoiseError(
            f"{run.method} is compared by models that only the run itself can make; ask the result that train returned"
        )
    if shared is not None:
        return Sides(local, _shared(shared, run.global_buffers(), local), "personal models and the global one")
    return Sides(local, None, "personal models of two clients")


def measure(run: Trained, name: str, samples: int, progress: Callable[[int, int], None]) -> Similarity:
    """Compare the clients' models of a run with the global model, on test samples of all clients.

    A client's model is its personal one or, if the method has none, the global model after one more local training.
    Without a global model, the consensus model takes its place; without either, clients are compared with each other.

    Args:
        run: the run.
        name: name of the run in the result.
        samples: largest number of test samples.
        progress: is called with the numbers of finished pairs and of all pairs.
    """
    x = _samples(run.federation, samples)
    found = sides(run.run) if isinstance(run, SimulatedRun) else _saved_sides(run)
    device = found.local[0].vector.device
    x = x.to(device)
    names = heard_layers(run.to_module(found.local[0].vector, found.local[0].buffers, device), x)
    clients = [run.names[model.who] for model in found.local]

    def gram_matrices(model: ClientModel) -> list[Tensor]:
        module = run.to_module(model.vector, model.buffers, device)
        return [gram(h) for h in representations(module, x, names)]

    pairs: list[str] = []
    columns: list[list[float]] = []

    def compare(title: str, one: list[Tensor], two: list[Tensor], total: int) -> None:
        pairs.append(title)
        columns.append(torch.stack([(a * b).sum() for a, b in zip(one, two, strict=True)]).tolist())
        progress(len(pairs), total)

    if found.other is not None:
        # A global model without buffers is the same for all clients, so its representations are computed once.
        same = all(model.vector is found.other[0].vector and model.buffers is None for model in found.other)
        common = gram_matrices(found.other[0]) if same else []
        for title, model, other in zip(clients, found.local, found.other, strict=True):
            compare(title, gram_matrices(model), common or gram_matrices(other), len(clients))
    else:
        if len(clients) < 2:
            raise EquipoiseError("there is only one client and no global model, so there is nothing to compare")
        chosen = sorted(randomness.generator(0, "cka clients").permutation(len(clients))[:_MOST_PAIRED])
        seen = [gram_matrices(found.local[k]) for k in chosen]
        for i, j in combinations(range(len(chosen)), 2):
            title = f"{clients[chosen[i]]} {clients[chosen[j]]}"
            compare(title, seen[i], seen[j], len(chosen) * (len(chosen) - 1) // 2)
    return Similarity(name, run.rounds, found.between, len(x), tuple(names), tuple(pairs), np.array(columns).T)


def _samples(federation: Federation, count: int) -> Tensor:
    """Return up to `count` test samples of all clients together, the same for every model."""
    every = np.concatenate([federation.test[who] for who in range(len(federation))])
    if len(every) < 2:
        raise EquipoiseError("CKA compares representations of test samples, and there are fewer than two")
    chosen = randomness.generator(0, "cka samples").permutation(every)[:count]
    return federation.gather(torch.from_numpy(np.sort(chosen)))[0]
