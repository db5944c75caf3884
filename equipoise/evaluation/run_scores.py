"""The scores of a run: those of the clients that train and, separately, of those unseen in training."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.data.federation import Federation
from equipoise.distributed.placement import Placement
from equipoise.evaluation.attack_success import SuccessCounter
from equipoise.evaluation.evaluator import Evaluator
from equipoise.executors.base import Executor
from equipoise.state import ClientStates, State
from equipoise.storage.model_kinds import KINDS

_UNSEEN = "unseen."


class RunScores:
    """The evaluators of a run: one for the clients that train, one for newcomers, which took no part in training."""

    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        executor: Executor,
        malicious: frozenset[str] = frozenset(),
        select: str = "validation",
        budgets: Mapping[str, int] | None = None,
        placement: Placement | None = None,
        success: SuccessCounter | None = None,
    ):
        """Create the evaluators of a run.

        Args:
            federation: the clients and their data.
            algorithm: the algorithm, whose models are scored.
            executor: makes and scores the models.
            malicious: names of clients that are scored but do not count in any figure.
            select: the samples on which the hybrid model is chosen, "validation" or "test".
            budgets: iteration limit of each client by name.
            placement: which clients belong to which process.
            success: counts the success of an attack on the clients that train, if it is measured.
        """
        training, unseen = federation.by_name
        self.training = Evaluator(
            federation,
            algorithm,
            executor,
            training,
            False,
            malicious,
            select,
            budgets,
            placement=placement,
            success=success,
        )
        self.newcomers = None
        if unseen:
            self.newcomers = Evaluator(
                federation, algorithm, executor, unseen, unseen=True, select=select, placement=placement
            )

    def adapt(self, round: int, server: State, store: ClientStates, last: bool) -> None:
        """Score the newcomers, but only after the last round, because adapting models to them means training.

        Args:
            round: number of the round.
            server: the server's state.
            store: the clients' states.
            last: whether this is the last round.
        """
        if self.newcomers is not None:
            self.newcomers.forget()
            if last:
                self.newcomers(round, server, store)

    def summary(self) -> dict[str, Any]:
        """Return the figures of each kind of model, and under "unseen" those of the newcomers."""
        found: dict[str, Any] = self.training.board().full_summary()
        if self.newcomers is not None and (figures := self.newcomers.board().full_summary()):
            cost = {"clients": len(self.newcomers.order), "adaptation_samples": self.newcomers.adaptation_samples}
            found["unseen"] = {**cost, **figures}
        return found

    def tables(self) -> dict[str, np.ndarray]:
        """Return a table of scores for each kind of model, one row per client; NaN if it has no model of that kind."""
        tables = self.training.board().tables()
        if self.newcomers is not None:
            for kind, scores in self.newcomers.board().tables().items():
                blank = np.full_like(scores, np.nan)
                tables[kind] = tables.get(kind, blank).copy()
                tables[kind][self.newcomers.order] = scores[self.newcomers.order]
        return {kind: tables[kind] for kind in KINDS if kind in tables}

    def of(self, who: int) -> Evaluator:
        """Return the evaluator that scores this client."""
        return self.training if self.newcomers is None or who not in self.newcomers.order else self.newcomers

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps as JSON."""
        return {"training": self.training.facts(), "unseen": self.newcomers.facts() if self.newcomers else None}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps as tensors."""
        newcomers = self.newcomers.tensors() if self.newcomers else {}
        return self.training.tensors() | {f"{_UNSEEN}{name}": tensor for name, tensor in newcomers.items()}

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        """Restore what `facts` and `tensors` returned, and tell whether these are scores by the same metrics."""
        same = self.training.restore(facts["training"], tensors)
        if self.newcomers is not None:
            unseen = {k.removeprefix(_UNSEEN): t for k, t in tensors.items() if k.startswith(_UNSEEN)}
            same &= self.newcomers.restore(facts["unseen"], unseen)
        return same
