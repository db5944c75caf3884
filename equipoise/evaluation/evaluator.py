"""Evaluation of the personal, consensus, global and hybrid models of clients."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import HasConsensusModel
from equipoise.data.federation import Federation
from equipoise.evaluation.scoreboard import Scoreboard, score_row
from equipoise.executors.base import BUFFERS, ClientJob, ClientModel, Executor, ModelKind
from equipoise.metrics import Metric
from equipoise.state import ClientStates, State
from equipoise.storage.model_kinds import COLUMNS, SCORED

AT_ONCE = 256
"""Number of clients whose personal models are in memory together."""


class ScoreTable:
    """One row of scores per client, NaN for an empty split, with the digest of the model that was scored."""

    def __init__(self, clients: int):
        self.scores = np.full((clients, len(COLUMNS)), np.nan)
        self.digest = np.zeros((clients, 16), dtype=np.uint8)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {"scores": torch.from_numpy(self.scores), "digest": torch.from_numpy(self.digest)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self.scores, self.digest = tensors["scores"].numpy().copy(), tensors["digest"].numpy().copy()


def _digest(*tensors: Tensor | None) -> np.ndarray:
    hasher = blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is not None:
            hasher.update(tensor.contiguous().numpy().data)
    return np.frombuffer(hasher.digest(), dtype=np.uint8)


class Evaluator:
    """Scores models on the clients' validation and test splits; a model that did not change is not scored again."""

    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        executor: Executor,
        who: list[int],
        unseen: bool = False,
        malicious: frozenset[str] = frozenset(),
        select: str = "validation",
        budgets: Mapping[str, int] | None = None,
    ):
        """Create an evaluator.

        Args:
            federation: the clients and their data.
            algorithm: the algorithm, whose models are scored.
            executor: makes and scores the models.
            who: the clients to score.
            unseen: whether these clients took no part in training.
            malicious: names of clients that are scored but do not count in any figure.
            select: the samples on which the hybrid model is chosen, "validation" or "test".
            budgets: iteration limit of each client by name.
        """
        self.federation, self.algorithm, self.executor = federation, algorithm, executor
        self.order, self.unseen, self.malicious, self.select = who, unseen, malicious, select
        self.budgets = budgets or {}
        self.metric: Metric = executor.task.metric
        self.tables = {kind: ScoreTable(len(federation)) for kind in SCORED}
        self.has = dict.fromkeys(SCORED, False)
        self.adaptation_samples = 0
        "number of samples that were trained on to make the personal models of the last evaluation"
        self.scored = 0
        "number of models scored so far; tests use it to check that nothing is scored twice"

    def __call__(self, round: int, server: State, store: ClientStates) -> None:
        """Score the models of all clients after a round."""
        self.adaptation_samples = 0
        self._own_models("personal", "unseen" if self.unseen else "personal", round, server, store)
        if isinstance(self.algorithm, HasConsensusModel) and not self.unseen:
            self._own_models("consensus", "consensus", round, server, store)
        vector = self.algorithm.global_model(server)
        if self.unseen and len(self.executor.task.buffers):
            vector = None  # a client that never trained has no BatchNorm statistics for the global model
        self.has["global"] = vector is not None
        if vector is not None:
            self._global(vector, store)

    def forget(self) -> None:
        """Discard the scores, because the models have changed since."""
        self.has = dict.fromkeys(SCORED, False)
        self.adaptation_samples = 0

    def _own(self, who: int) -> np.ndarray:
        return np.concatenate([self.federation.validation[who], self.federation.test[who]])

    def _write(self, table: ScoreTable, who: int, scores: np.ndarray) -> None:
        table.scores[who] = score_row(scores, len(self.federation.validation[who]), self.metric)

    def _score(self, table: ScoreTable, models: list[ClientModel]) -> None:
        changed = []
        for model in models:
            digest = _digest(model.vector, model.buffers)
            if not np.array_equal(table.digest[model.who], digest):
                table.digest[model.who] = digest
                changed.append(model)
        self.scored += len(changed)
        own = [self._own(model.who) for model in changed]
        for model, scores in zip(changed, self.executor.score(changed, own), strict=True):
            self._write(table, model.who, scores)

    def _job(self, who: int, server: State, store: ClientStates) -> ClientJob:
        down = self.algorithm.broadcast(server, self.federation.numbers[who])
        return ClientJob(who, store.get(who), down, self.budgets.get(self.federation.names[who]))

    def _own_models(self, kind: str, made: ModelKind, round: int, server: State, store: ClientStates) -> None:
        """Make and score the models of a kind of which every client has its own."""
        for first in range(0, len(self.order), AT_ONCE):
            jobs = [self._job(who, server, store) for who in self.order[first : first + AT_ONCE]]
            models = []
            for model, samples in self.executor.models(round, jobs, made):
                self.adaptation_samples += samples
                if model is None:
                    return
                models.append(model)
            self.has[kind] = True
            self._score(self.tables[kind], models)

    def _global(self, vector: Tensor, store: ClientStates) -> None:
        if len(self.executor.task.buffers):  # each client scores the global model with its own buffers
            self._score(
                self.tables["global"], [ClientModel(who, vector, store.get(who).get(BUFFERS)) for who in self.order]
            )
            return
        digest, table = _digest(vector), self.tables["global"]
        if np.array_equal(table.digest[self.order[0]], digest):
            return
        table.digest[:] = digest
        self.scored += 1
        own = [self._own(who) for who in self.order]
        scores = self.executor.score_one(vector, np.concatenate(own))
        ends = np.cumsum([len(indices) for indices in own])
        for who, indices, end in zip(self.order, own, ends, strict=True):
            self._write(table, who, scores[:, end - len(indices) : end])

    def board(self) -> Scoreboard:
        """Return the scores of all kinds of models."""
        counted = np.zeros(len(self.federation), dtype=bool)
        counted[[who for who in self.order if self.federation.names[who] not in self.malicious]] = True
        return Scoreboard(
            self.metric,
            counted & (self.federation.validation.lengths > 0),
            counted & (self.federation.test.lengths > 0),
            {kind: table.scores for kind, table in self.tables.items() if self.has[kind]},
            self.select,
        )

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps as JSON."""
        return {"has": self.has, "adaptation_samples": self.adaptation_samples}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps as tensors."""
        return {f"{kind}.{k}": t for kind, table in self.tables.items() for k, t in table.tensors().items()}

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Restore what `facts` and `tensors` returned."""
        self.has, self.adaptation_samples = self.has | facts["has"], facts["adaptation_samples"]
        for kind, table in self.tables.items():
            if f"{kind}.scores" in tensors:  # checkpoints of older versions lack some kinds
                table.restore({k: tensors[f"{kind}.{k}"] for k in ("scores", "digest")})
