"""The scores of a run: of the clients that train, and, apart from them, of those that took no part."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.data.federation import Federation
from equipoise.evaluation.evaluator import Evaluator
from equipoise.executors.base import Executor
from equipoise.model_kinds import KINDS
from equipoise.state import ClientStates, State

_UNSEEN = "unseen."


class RunScores:
    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        executor: Executor,
        malicious: frozenset[str] = frozenset(),
        select: str = "validation",
        budgets: Mapping[str, int] | None = None,
    ):
        training, unseen = federation.by_name
        self.training = Evaluator(federation, algorithm, executor, training, False, malicious, select, budgets)
        self.newcomers = None
        if unseen:
            self.newcomers = Evaluator(federation, algorithm, executor, unseen, unseen=True, select=select)

    def adapt(self, round: int, server: State, store: ClientStates, last: bool) -> None:
        """Score those who took no part. Adapting takes training: it is done once, at the end."""
        if self.newcomers is not None:
            self.newcomers.forget()
            if last:
                self.newcomers(round, server, store)

    def summary(self) -> dict[str, Any]:
        """The figures of each kind of model, and under "unseen" those of the clients that took no part."""
        found: dict[str, Any] = self.training.board().summary()
        if self.newcomers is not None and (figures := self.newcomers.board().summary()):
            cost = {"clients": len(self.newcomers.order), "adaptation_samples": self.newcomers.adaptation_samples}
            found["unseen"] = {**cost, **figures}
        return found

    def tables(self) -> dict[str, np.ndarray]:
        """Every kind's table of scores, a row a client; NaN where a client has no model of that kind."""
        tables = self.training.board().tables()
        if self.newcomers is not None:
            for kind, scores in self.newcomers.board().tables().items():
                blank = np.full_like(scores, np.nan)
                tables[kind] = tables.get(kind, blank).copy()
                tables[kind][self.newcomers.order] = scores[self.newcomers.order]
        return {kind: tables[kind] for kind in KINDS if kind in tables}

    def of(self, who: int) -> Evaluator:
        """Who scores this client."""
        return self.training if self.newcomers is None or who not in self.newcomers.order else self.newcomers

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the scores, beside `tensors`."""
        return {"training": self.training.facts(), "unseen": self.newcomers.facts() if self.newcomers else None}

    def tensors(self) -> dict[str, Tensor]:
        newcomers = self.newcomers.tensors() if self.newcomers else {}
        return self.training.tensors() | {f"{_UNSEEN}{name}": tensor for name, tensor in newcomers.items()}

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.training.restore(facts["training"], tensors)
        if self.newcomers is not None:
            unseen = {k.removeprefix(_UNSEEN): t for k, t in tensors.items() if k.startswith(_UNSEEN)}
            self.newcomers.restore(facts["unseen"], unseen)
