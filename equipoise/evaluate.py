"""Scores of the personal, the global and the hybrid model of every client."""

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.data.federation import Federation
from equipoise.engine.executor import BUFFERS, Executor, Job, Model
from equipoise.engine.store import ClientStore
from equipoise.losses import Metric
from equipoise.state import State

COLUMNS = ("validation_loss", "validation_metric", "test_loss", "test_metric")
KINDS = ("personal", "global", "hybrid")
_AT_ONCE = 256  # clients whose personal models are in memory together


class Table:
    """A row of scores a client, NaN where a split is empty, with the digest of the model that was scored."""

    def __init__(self, clients: int):
        self.scores = np.full((clients, len(COLUMNS)), np.nan)
        self.digest = np.zeros((clients, 16), dtype=np.uint8)

    def tensors(self) -> dict[str, Tensor]:
        return {"scores": torch.from_numpy(self.scores), "digest": torch.from_numpy(self.digest)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
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
        self, federation: Federation, algorithm: Algorithm, executor: Executor, who: list[int], unseen: bool = False
    ):
        self.federation, self.algorithm, self.executor = federation, algorithm, executor
        self.order, self.unseen = who, unseen
        self.metric: Metric = executor.task.metric
        self.personal, self.shared = Table(len(federation)), Table(len(federation))
        self.has = {"personal": False, "global": False}
        self.adaptation_samples = 0
        "samples through a backward pass to make the personal models of the last evaluation"
        self.scored = 0
        "models scored so far, for those who want to see that nothing is scored twice"

    def __call__(self, round: int, server: State, store: ClientStore) -> None:
        self._personal(round, server, store)
        vector = self.algorithm.shared(server)
        if self.unseen and len(self.executor.task.buffers):
            vector = None  # a client that never trained has no statistics of its own to run the global model with
        self.has["global"] = vector is not None
        if vector is not None:
            self._global(vector, store)

    def forget(self) -> None:
        """The models have moved on; what was scored before says nothing of them."""
        self.has = {"personal": False, "global": False}
        self.adaptation_samples = 0

    def _own(self, who: int) -> np.ndarray:
        return np.concatenate([self.federation.validation[who], self.federation.test[who]])

    def _write(self, table: Table, who: int, scores: np.ndarray) -> None:
        cut = len(self.federation.validation[who])
        for column, values in ((0, scores[:, :cut]), (2, scores[:, cut:])):
            if values.shape[1]:
                loss, metric = values.mean(axis=1)
                table.scores[who, column : column + 2] = loss, self.metric.finish(metric)

    def _score(self, table: Table, models: list[Model]) -> None:
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

    def _personal(self, round: int, server: State, store: ClientStore) -> None:
        self.adaptation_samples = 0
        for first in range(0, len(self.order), _AT_ONCE):
            jobs = [
                Job(who, store.get(who), self.algorithm.down(server, who))
                for who in self.order[first : first + _AT_ONCE]
            ]
            models = []
            for model, samples in self.executor.personal(round, jobs, self.unseen):
                self.adaptation_samples += samples
                if model is None:
                    return
                models.append(model)
            self.has["personal"] = True
            self._score(self.personal, models)

    def _global(self, vector: Tensor, store: ClientStore) -> None:
        if len(self.executor.task.buffers):  # each client scores the global model with buffers of its own
            self._score(self.shared, [Model(who, vector, store.get(who).get(BUFFERS)) for who in self.order])
            return
        digest = _digest(vector)
        if np.array_equal(self.shared.digest[self.order[0]], digest):
            return
        self.shared.digest[:] = digest
        self.scored += 1
        own = [self._own(who) for who in self.order]
        scores = self.executor.score_one(vector, np.concatenate(own))
        ends = np.cumsum([len(indices) for indices in own])
        for who, indices, end in zip(self.order, own, ends, strict=True):
            self._write(self.shared, who, scores[:, end - len(indices) : end])

    def tables(self) -> dict[str, np.ndarray]:
        """Every kind's table of scores, a row a client in the federation's order."""
        tables = {}
        if self.has["personal"]:
            tables["personal"] = self.personal.scores
        if self.has["global"]:
            tables["global"] = self.shared.scores
        if len(tables) == 2 and self.federation.validation.lengths.any():
            tables["hybrid"] = np.where(self.takes_global()[:, None], self.shared.scores, self.personal.scores)
        return tables

    def takes_global(self) -> np.ndarray:
        """Whose hybrid model is the global one: better on the client's validation samples, where it has any."""
        return np.asarray(self.metric.better(self.shared.scores[:, 1], self.personal.scores[:, 1]))

    def summary(self) -> dict[str, Any]:
        mine = np.zeros(len(self.federation), dtype=bool)
        mine[self.order] = True
        has = {split: mine & (getattr(self.federation, split).lengths > 0) for split in ("validation", "test")}
        return {
            kind: summarise(table[has["test"], 2:], table[has["validation"], 1], self.metric)
            for kind, table in self.tables().items()
        }

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the tables."""
        return {"has": self.has, "adaptation_samples": self.adaptation_samples}

    def tensors(self) -> dict[str, Tensor]:
        personal = {f"personal.{k}": t for k, t in self.personal.tensors().items()}
        return personal | {f"global.{k}": t for k, t in self.shared.tensors().items()}

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.has, self.adaptation_samples = facts["has"], facts["adaptation_samples"]
        for name, table in (("personal", self.personal), ("global", self.shared)):
            table.restore({k: tensors[f"{name}.{k}"] for k in ("scores", "digest")})


def summarise(test: np.ndarray, validation: np.ndarray, metric: Metric) -> dict[str, float | None]:
    """Figures over clients, each counting once, from their (loss, score) on test and their score on validation.

    A client whose score is NaN spoils the figure, as it should; in JSON that is null.
    """
    if not len(test):
        return {}
    loss, score = test[:, 0], test[:, 1]
    worst_first = np.sort(score) if metric.higher_is_better else -np.sort(-score)
    tenth = max(1, round(0.1 * len(test)))
    name = metric.name
    figures = {
        name: score.mean(),
        f"{name}_std": score.std(),
        **({"mse": (score**2).mean()} if name == "rmse" else {}),
        "loss": loss.mean(),
        "loss_variance": loss.var(),
        "worst_decile": worst_first[:tenth].mean() if np.isfinite(score).all() else np.nan,
    }
    if len(validation):
        figures[f"validation_{name}"] = validation.mean()
    return {key: float(value) if np.isfinite(value) else None for key, value in figures.items()}
