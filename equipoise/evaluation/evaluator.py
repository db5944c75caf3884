"""Evaluation of the personal, consensus, global and hybrid models of clients."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import HasConsensusModel
from equipoise.data.federation import Federation
from equipoise.distributed.placement import Placement
from equipoise.distributed.ranks import Ranks
from equipoise.evaluation.attack_success import COUNTS, SuccessCounter
from equipoise.evaluation.kept_predictions import KeptPredictions, SimulatedPredictions
from equipoise.evaluation.scoreboard import Scoreboard, score_columns, score_row
from equipoise.executors.base import ClientJob, ClientModel, Executor, ModelKind
from equipoise.executors.sample_scores import SampleScores
from equipoise.metrics import MOST_OUTPUTS, MetricCollection
from equipoise.state import ClientStates, State
from equipoise.storage.model_kinds import SCORED
from equipoise.training.buffers import BUFFERS, broadcast

AT_ONCE = 256
"""Number of clients whose personal models are in memory together."""
PIECE = 4096
"""Largest number of samples that the global model is scored on at a time; a piece has clients of one shard only."""


class ScoreTable:
    """One row of scores per client, NaN for an empty split, with the digest of the model that was scored."""

    def __init__(self, clients: int, columns: int, kept: KeptPredictions):
        """Create an empty table.

        Args:
            clients: number of clients.
            columns: number of scores of a client.
            kept: what is kept of the models' predictions.
        """
        self.scores = np.full((clients, columns), np.nan)
        self.digest = np.zeros((clients, 16), dtype=np.uint8)
        self.counts = np.zeros((clients, len(COUNTS)), dtype=np.int64)
        "counts of an attack's success on each client, if it is measured"
        self.kept = kept

    def rows(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """Return the rows of some clients, for other processes."""
        own = {name: torch.from_numpy(array[clients]) for name, array in self._arrays().items()}
        return own | self.kept.rows(clients)

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"scores": self.scores, "digest": self.digest, "counts": self.counts}

    def take(self, clients: Sequence[int], rows: dict[str, Tensor]) -> None:
        """Take what `rows` returned for these clients in another process."""
        for name, array in self._arrays().items():
            array[clients] = rows[name].numpy()
        self.kept.take(clients, rows)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps; nothing as long as no model was scored, as such a table may be large."""
        if not self.digest.any():
            return {}
        own = {name: torch.from_numpy(array) for name, array in self._arrays().items()}
        if not self.counts.any():
            del own["counts"]
        return own | self.kept.tensors()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self.scores, self.digest = tensors["scores"].numpy().copy(), tensors["digest"].numpy().copy()
        if "counts" in tensors:
            self.counts = tensors["counts"].numpy().copy()
        self.kept.restore(tensors)


def _digest(*tensors: Tensor | None) -> np.ndarray:
    hasher = blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is not None:
            hasher.update(tensor.cpu().contiguous().numpy().data)
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
        first_number: int = 0,
        keep: bool = False,
        placement: Placement | None = None,
        success: SuccessCounter | None = None,
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
            first_number: number by which the server knows the first client by name; larger than 0 if the federation
                has only clients that come after training.
            keep: whether personal models stay in memory after they are scored.
            placement: which clients belong to which process; without it all belong to this one.
            success: counts the success of an attack, if it is measured.
        """
        self.success = success
        self.ranks = Ranks() if placement is None else placement.ranks
        owner = (lambda number: 0) if placement is None else placement.owner
        self.parts = [[i for i in who if owner(federation.numbers[i]) == rank] for rank in range(self.ranks.size)]
        "the clients of each process"
        self.own = self.parts[self.ranks.rank]
        self.first_number = first_number
        self.kept: list[ClientModel] | None = [] if keep else None
        "the personal models of the last evaluation, if they are to be kept"
        self.federation, self.algorithm, self.executor = federation, algorithm, executor
        self.order, self.unseen, self.malicious, self.select = who, unseen, malicious, select
        self.budgets = budgets or {}
        self.metrics: MetricCollection = executor.task.metrics
        self.tables = {kind: self._blank() for kind in SCORED}
        self.has = dict.fromkeys(SCORED, False)
        self.adaptation_samples = 0
        "number of samples that were trained on to make the personal models of the last evaluation"
        self.scored = 0
        "number of models scored so far; tests use it to check that nothing is scored twice"

    def _blank(self) -> ScoreTable:
        kept = KeptPredictions(self.federation, self.metrics, self.executor.task.outputs_per_sample)
        return ScoreTable(len(self.federation), len(score_columns(self.metrics)), kept)

    def __call__(self, round: int, server: State, store: ClientStates) -> None:
        """Score the models of all clients after a round."""
        self.adaptation_samples = 0
        self._own_models("personal", "unseen" if self.unseen else "personal", round, server, store)
        if isinstance(self.algorithm, HasConsensusModel) and not self.unseen:
            self._own_models("consensus", "consensus", round, server, store)
        vector = self.algorithm.global_model(server)
        if self.unseen and len(self.executor.task.buffers) and BUFFERS not in server:
            vector = None  # a client that never trained has no BatchNorm statistics for the global model
        self.has["global"] = vector is not None
        if vector is not None:
            self._global(vector, server.get(BUFFERS), store)
        self._share()

    def _share(self) -> None:
        """Exchange the scores with other processes, so that each has those of all clients."""
        if self.ranks.size == 1:
            return
        found = self.ranks.gather_json([self.has, self.adaptation_samples])
        self.has = {kind: any(has[kind] for has, _ in found) for kind in self.has}
        self.adaptation_samples = sum(samples for _, samples in found)
        for kind, has in self.has.items():
            if has:
                for clients, rows in zip(self.parts, self.ranks.gather(self.tables[kind].rows(self.own)), strict=True):
                    self.tables[kind].take(clients, rows)

    def forget(self) -> None:
        """Discard the scores, because the models have changed since."""
        self.has = dict.fromkeys(SCORED, False)
        self.adaptation_samples = 0

    def _own(self, who: int) -> np.ndarray:
        return np.concatenate([self.federation.validation[who], self.federation.test[who]])

    def _write(self, table: ScoreTable, who: int, scores: SampleScores) -> None:
        cut = len(self.federation.validation[who])
        table.scores[who] = score_row(scores, cut, self.metrics)
        if scores.predictions is not None:
            table.kept.write(who, scores.predictions[cut:])

    def _parts(self, clients: Sequence[int]) -> list[list[int]]:
        """Split positions in a list of clients so that the outputs of a part fit in memory, if they are kept."""
        if "outputs" not in self.metrics.needs:
            return [list(range(len(clients)))] if clients else []
        each = self.executor.task.outputs_per_sample
        return self.executor.shards.portions(
            range(len(clients)),
            lambda position: self.federation.numbers[clients[position]],
            MOST_OUTPUTS,
            lambda position: each * len(self._own(clients[position])),
        )

    def _score(self, table: ScoreTable, models: list[ClientModel]) -> None:
        changed = []
        for model in models:
            digest = _digest(model.vector, model.buffers)
            if not np.array_equal(table.digest[model.who], digest):
                table.digest[model.who] = digest
                changed.append(model)
        self.scored += len(changed)
        for part in self._parts([model.who for model in changed]):
            some = [changed[position] for position in part]
            own = [self._own(model.who) for model in some]
            for model, scores in zip(some, self.executor.score(some, own), strict=True):
                self._write(table, model.who, scores)
        if self.success is not None:
            for model in changed:
                module = self.success.module(model.vector, model.buffers)
                if model.looks_up:
                    module = self.executor.predictor(module, model.who)
                table.counts[model.who] = self.success.count(model.who, module)

    def _job(self, who: int, server: State, store: ClientStates) -> ClientJob:
        down = broadcast(self.algorithm, server, self.first_number + self.federation.numbers[who])
        return ClientJob(who, store.get(who), down, self.budgets.get(self.federation.names[who]))

    def _own_models(self, kind: str, made: ModelKind, round: int, server: State, store: ClientStates) -> None:
        """Make and score the models of a kind of which every client has its own."""
        for some in self.executor.shards.portions(self.own, self.federation.numbers.__getitem__, AT_ONCE):
            jobs = [self._job(who, server, store) for who in some]
            models = []
            for model, samples in self.executor.models(round, jobs, made):
                self.adaptation_samples += samples
                if model is None:
                    return
                models.append(model)
            self.has[kind] = True
            if self.kept is not None and kind == "personal":
                self.kept += models
            self._score(self.tables[kind], models)

    def _global(self, vector: Tensor, shared: Tensor | None, store: ClientStates) -> None:
        task = self.executor.task
        if len(task.buffers) and shared is None:  # each client scores the global model with its own buffers
            self._score(
                self.tables["global"], [ClientModel(who, vector, store.get(who).get(BUFFERS)) for who in self.own]
            )
            return
        buffers = None if shared is None else task.buffer_layout.merged(shared, task.buffers)
        digest, table = _digest(vector, buffers), self.tables["global"]
        if np.array_equal(table.digest[self.order[0]], digest):
            return
        table.digest[:] = digest
        self.scored += 1
        for part in self._parts(self.own):
            who = [self.own[position] for position in part]
            shards = list(self.executor.shards.group(who, self.federation.numbers.__getitem__).values())
            samples = [np.concatenate([self._own(each) for each in shard]) for shard in shards]
            pieces = [np.array_split(rows, max(1, -(-len(rows) // PIECE))) for rows in samples]
            scored = self.executor.score_pieces(vector, [piece for some in pieces for piece in some], buffers)
            for shard, some in zip(shards, pieces, strict=True):
                scores = SampleScores.concatenate(list(islice(scored, len(some))))
                ends = np.cumsum([len(self._own(each)) for each in shard])
                for each, end in zip(shard, ends, strict=True):
                    self._write(table, each, scores[end - len(self._own(each)) : end])
        if self.success is not None:
            module = self.success.module(vector, buffers)
            for each in self.own:
                table.counts[each] = self.success.count(each, module)

    def board(self) -> Scoreboard:
        """Return the scores of all kinds of models."""
        counted = np.zeros(len(self.federation), dtype=bool)
        counted[[who for who in self.order if self.federation.names[who] not in self.malicious]] = True
        kept = {kind: table.kept for kind, table in self.tables.items() if self.has[kind]}
        return Scoreboard(
            self.metrics,
            counted & (self.federation.validation.lengths > 0),
            counted & (self.federation.test.lengths > 0),
            self.federation.test.lengths,
            {kind: self.tables[kind].scores for kind in kept},
            SimulatedPredictions(self.federation, self.metrics.outputs, kept) if self.metrics.needs else None,
            self.select,
            {} if self.success is None else {kind: self.tables[kind].counts for kind in kept},
            self.success is not None and self.success.samples.measure.marks,
        )

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps as JSON."""
        names = [metric.name for metric in self.metrics.metrics]
        return {"has": self.has, "adaptation_samples": self.adaptation_samples, "metrics": names}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps as tensors."""
        return {f"{kind}.{k}": t for kind, table in self.tables.items() for k, t in table.tensors().items()}

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        """Restore what `facts` and `tensors` returned, and tell whether these are scores by the same metrics.

        If not, all models will be scored again.
        """
        names = [metric.name for metric in self.metrics.metrics]
        if facts.get("metrics", names) != names:
            return False
        tables = {kind: self._blank() for kind in SCORED}
        for kind, table in tables.items():
            own = {k.removeprefix(f"{kind}."): t for k, t in tensors.items() if k.startswith(f"{kind}.")}
            if not own:  # nothing was scored; checkpoints of older versions lack some kinds, too
                continue
            if own["scores"].shape != table.scores.shape:  # of an older version, which had one metric
                return False
            table.restore(own)
        self.tables = tables
        self.has, self.adaptation_samples = self.has | facts["has"], facts["adaptation_samples"]
        return True
