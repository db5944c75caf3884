"""Shadow runs: the same experiment with other data left out, for attacks that tell members from others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import randomness
from equipoise.data.federation import Federation, RaggedIndices
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.torch_device import CPU

Advance = Callable[[], None]
"""Is called after each shadow run."""
_BATCH = 512
_LEAST_LOSS = 1e-15
"""Loss of one sample below which rounding in float64 hides differences."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Samples of which an attack asks whether their client was trained on them."""

    index: np.ndarray
    "positions of the samples in the federation"
    who: np.ndarray
    "their clients"
    member: np.ndarray
    "whether the run was trained on them"

    @staticmethod
    def draw(run: Simulation, most: int, seed: int) -> "Candidates":
        """Draw equally many training and test samples of each client that trained.

        Args:
            run: the finished run.
            most: largest number of training samples of all clients together, and of test samples.
            seed: seed of the draw.
        """
        federation, found = run.federation, []
        share = max(1, most // len(run.training))
        for who in run.training:
            train, test = federation.train[who], federation.test[who]
            count = min(len(train) - 1, len(test), share)
            rng = randomness.generator(seed, "audit candidates", federation.names[who])
            for own, member in ((train, True), (test, False)):
                chosen = np.sort(rng.permutation(own)[: max(count, 0)])
                found.append((chosen, np.full(len(chosen), who), np.full(len(chosen), member)))
        drawn = Candidates(*(np.concatenate(column) for column in zip(*found, strict=True)))
        if len(drawn) < 2 * _LEAST_CANDIDATES:
            raise EquipoiseError(
                f"an audit compares training samples with test samples of the same clients, and there are only "
                f"{len(drawn) // 2} of each; it needs {_LEAST_CANDIDATES}: add a test part to data.split"
            )
        return drawn

    def __len__(self) -> int:
        return len(self.index)

    def halves(self, federation: Federation, seed: int, pair: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide the candidates of each client at random into two halves, one for each run of a pair.

        Args:
            federation: the clients.
            seed: seed of the division.
            pair: number of the pair.
        """
        inside = np.zeros(len(self), dtype=bool)
        for who in np.unique(self.who):
            own = np.flatnonzero(self.who == who)
            rng = randomness.generator(seed, "shadow samples", federation.names[who], pair)
            inside[rng.permutation(own)[: len(own) // 2]] = True
        return inside, ~inside

    def federation(self, federation: Federation, inside: np.ndarray) -> Federation:
        """Return the federation whose clients train on these of the candidates, and on what is no candidate."""
        train = []
        for who in range(len(federation)):
            own = self.who == who
            rest = np.setdiff1d(federation.train[who], self.index[own])
            train.append(np.sort(np.concatenate([rest, self.index[own & inside]])))
        return replace(federation, train=RaggedIndices(train))


_LEAST_CANDIDATES = 20


def without_clients(federation: Federation, left_out: np.ndarray) -> Federation:
    """Return the federation without these clients."""
    kept = [who for who in range(len(federation)) if who not in set(left_out.tolist())]
    train, validation, test = (
        RaggedIndices([part[who] for who in kept])
        for part in (federation.train, federation.validation, federation.test)
    )
    names = tuple(federation.names[who] for who in kept)
    return replace(federation, names=names, train=train, validation=validation, test=test, unseen=frozenset())


def shadow_run(run: Simulation, federation: Federation, seed: int) -> Simulation:
    """Train the experiment of a run on another federation, with other randomness; nothing is written.

    The initial model is the same, because the server knows it, and so is the standard deviation of noise on messages.

    Args:
        run: the run.
        federation: the clients and their data.
        seed: seed of batches, cohorts and noise.
    """
    settings = run.pipeline.settings
    if settings.privacy is not None and getattr(settings.privacy, "unit", "client") == "client":
        fixed = settings.privacy.model_copy(update={"sigma": run.pipeline.ledger.sigma, "target_epsilon": None})
        settings = replace(settings, privacy=fixed)
    schedule = run.schedule.model_copy(
        update={"seed": seed, "rounds": run.done, "evaluate_every": run.done, "participation": participation_of(run)}
    )
    shadow = Simulation(
        run.task, federation, run.algorithm, schedule, run.engine, uploads=settings, devices=run.devices
    )
    shadow.run()
    return shadow


def participation_of(run: Simulation) -> float:
    """Return the fraction of the clients that take part in a round of a run."""
    return run.cohort / len(run.training)


def shadow_seed(seed: int, purpose: str, number: int) -> int:
    """Return the seed of a shadow run."""
    return randomness.key(seed, purpose, number) % 2**31


def confidences(run: Simulation, candidates: Candidates) -> dict[str, np.ndarray]:
    """Return the confidence in each candidate's label of its client's personal model, and of the global model.

    Args:
        run: a run that is trained.
        candidates: the samples.
    """
    clients = np.unique(candidates.who).tolist()
    found: dict[str, np.ndarray] = {}
    for kind in ("personal", "global"):
        values = np.full(len(candidates), np.nan)
        for who, module in _models(run, clients, kind):
            own = candidates.who == who
            values[own] = confidence(run, module, candidates.index[own])
        if np.isfinite(values).all():
            found[kind] = values
    return found


def _models(run: Simulation, clients: list[int], kind: str) -> Iterator[tuple[int, nn.Module]]:
    """Yield each client's model of a kind; nothing if the method has none."""
    if kind == "personal":
        for model in run.models_made_alone(clients, "personal"):
            if model is not None:
                yield model.who, run.module_of(model)
        return
    same = run.global_buffers() is not None or not len(run.task.buffers)
    shared = run.global_module(clients[0])
    for who in clients:
        module = shared if same else run.global_module(who)  # BatchNorm statistics may be the client's own
        if module is not None:
            yield who, module


@torch.no_grad()
def confidence(run: Simulation, module: nn.Module, index: np.ndarray) -> np.ndarray:
    """Return the logarithm of the odds that a model gives to each sample's target: log(p / (1 - p)), p = exp(-loss).

    On this scale the confidences of models that were trained alike are nearly normal (Carlini et al., 2022, Sec. IV-B).

    Args:
        run: the run whose data and loss these are.
        module: the model.
        index: positions of the samples in the run's federation.
    """
    module = module.eval().to(CPU)
    losses = []
    for part in np.array_split(index, max(1, -(-len(index) // _BATCH))):
        x, y = run.federation.gather(run.federation.index(part))
        output = run.task.predict(module, x.to(CPU))
        wide = output.double() if output.is_floating_point() else output
        losses.append(run.task.loss.of_each(wide, _wide(y.to(CPU))))
    loss = torch.cat(losses).double()
    if run.task.loss.least < 0:
        return np.asarray(-loss)
    loss = loss.clamp(min=_LEAST_LOSS)
    return np.asarray(-(loss + torch.log(-torch.expm1(-loss))))


def _wide(y: Tensor) -> Tensor:
    return y.double() if y.is_floating_point() else y
