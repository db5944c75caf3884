"""Many clients in one call: their vectors stacked, every operator batched over them.

The gradient of a whole stack is traced once into a plain list of tensor operations, so that a step pays neither for
autograd nor for vmap; `compiled` hands that list to torch.compile.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import DataSplit
from equipoise.data.federation import BatchBuffer, Federation
from equipoise.errors import EquipoiseError
from equipoise.executors.base import (
    ClientJob,
    ClientModel,
    ClientResult,
    Executor,
    ModelKind,
    SampleScores,
    StackRow,
    stack_states,
)
from equipoise.parameter_space import ParameterEntry, Part
from equipoise.representations.head_moments import Moments
from equipoise.representations.points import HEAD, ForwardHook
from equipoise.representations.terms import LossTerm
from equipoise.state import State, stack
from equipoise.training.batches import Batch, batch_indices, batch_order
from equipoise.training.head_statistics import client_class_sums, client_moments
from equipoise.training.local_trainer import LocalTrainer
from equipoise.training.task import Task

_GROUP = 20  # clients in a stack: enough to spread the cost of a call, few enough for the cache
_NARROW = 32
_SCORE_BATCH = 256


def _narrow_linear(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """x W' with few columns, computed as (W x')': batched, that is several times faster on a CPU."""

    def forward(x: Tensor) -> Tensor:
        if x.ndim != 2 or layer.bias is None:
            return nn.functional.linear(x, layer.weight, layer.bias)
        return (layer.weight @ x.t() + layer.bias[:, None]).t()

    return forward


class StackedModule:
    """The gradients of a stack of clients, traced once for each shape of the batches."""

    def __init__(self, task: Task, compiled: bool = False):
        self.task, self.compiled = task, compiled
        self.module = copy.deepcopy(task.module)
        for layer in self.module.modules():
            if type(layer) is nn.Linear and layer.out_features <= _NARROW:
                layer.forward = _narrow_linear(layer)  # type: ignore[method-assign,assignment]
        self.module.train()
        self.scoring = copy.deepcopy(task.module).eval()
        self.memory = BatchBuffer()
        self.traced: dict[tuple[object, ...], Callable[..., Tensor]] = {}

    def gradient(self, v: Tensor, batch: Batch, part: Part, term: LossTerm | None, term_only: bool) -> Tensor:
        """As one flat (cohort, P) tensor."""

        def flat(v: Tensor, *rest: Tensor) -> Tensor:
            found = self._each(v, *rest, part=part, term=term, term_only=term_only)
            pieces = [g.permute(0, 1, 3, 4, 2) if g.ndim == 5 else g for _, g in found]
            return torch.cat([piece.reshape(len(v), -1) for piece in pieces], dim=1)

        return self._call(("gradient", part, term_only), flat, v, batch, term)

    def step(self, v: Tensor, batch: Batch, part: Part, lr: float, term: LossTerm | None) -> None:
        """Straight into the vector, without putting the gradient together first."""

        def into(v: Tensor, *rest: Tensor) -> Tensor:
            for entry, g in self._each(v, *rest, part=part, term=term, term_only=False):
                entry.view(v).add_(g, alpha=-lr)
            return v

        self._call(("step", part, lr), into, v, batch, term)

    def _each(
        self,
        v: Tensor,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        *beside: Tensor,
        part: Part,
        term: LossTerm | None,
        term_only: bool,
    ) -> list[tuple[ParameterEntry, Tensor]]:
        """`beside` are the tensors of the term; a trace must not hold those of the term that it was made with."""
        space, each = self.task.space, self.task.loss.each
        low, high, _ = space.part(part).indices(space.size)
        moving = [e for e in space.entries if low <= e.offset < high]
        still = [e for e in space.entries if not low <= e.offset < high]
        assert each is not None
        listener = None if term is None else ForwardHook(self.module, term.at, self.task.head)

        def value(output: Tensor, x: Tensor, y: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
            """Of each sample, with the term, whose probe is asked in the same pass."""
            if term is None or listener is None:
                return each(output, y)
            h = listener.take()
            probed: tuple[Tensor, ...] = ()
            if term.probe is not None:
                functional_call(self.module, space.views(beside[0]), (x,))
                probed = listener.take()
            given = State(zip(term.given, beside[term.probe is not None :], strict=True))
            found = term.each(h, probed, y, given)
            return found if term_only else found + each(output, y)

        def loss(
            p: dict[str, Tensor],
            fixed: dict[str, Tensor],
            x: Tensor,
            y: Tensor,
            weights: Tensor,
            beside: tuple[Tensor, ...],
        ) -> Tensor:
            return (value(functional_call(self.module, {**p, **fixed}, (x,)), x, y, beside) * weights).sum()

        p, fixed = ({e.name: e.view(v) for e in entries} for entries in (moving, still))
        try:
            gradients = vmap(grad(loss))(p, fixed, x, y, weights, beside)
        finally:
            if listener is not None:
                listener.close()
        return [(e, gradients[e.name]) for e in moving]

    def _call(
        self, what: tuple[object, ...], function: Callable[..., Tensor], v: Tensor, batch: Batch, term: LossTerm | None
    ) -> Tensor:
        x, y, weights = batch[:3]
        beside: list[Tensor] = []
        if term is not None:
            beside = [t[: len(v)] for t in ([] if term.probe is None else [term.probe]) + list(term.given.values())]
            what = (*what, type(term), term.at, tuple(term.given), *(t.shape for t in beside))
        key = (*what, x.shape, y.shape, v.dtype)
        if key not in self.traced:
            graph = make_fx(function)(v.clone(), x, y, weights, *beside)
            _simplify(graph)
            self.traced[key] = torch.compile(graph, dynamic=False) if self.compiled else graph
        return self.traced[key](v, x, y, weights, *beside)


def _simplify(module: torch.fx.GraphModule) -> None:
    """Take out what nobody asks for (the loss itself) and views that change nothing: each costs microseconds a step."""
    views = (torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten._unsafe_view.default)
    for node in module.graph.nodes:
        if node.target in views and node.meta["val"].shape == node.args[0].meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()
    module.recompile()


class StackedTrainer(LocalTrainer):
    """A stack of clients' data. Clients with fewer samples or steps are padded and stand still when done."""

    def __init__(
        self,
        module: StackedModule,
        federation: Federation,
        algorithm: Algorithm,
        seed: int,
        round: int,
        who: Sequence[int],
        purpose: str,
    ):
        self.module, self.federation, self.algorithm = module, federation, algorithm
        self.task, self.space, self.dtype = module.task, module.task.space, module.task.dtype
        self.seed, self.round, self.purpose, self.who = seed, round, purpose, who
        self.samples = np.zeros(len(who), dtype=np.int64)
        self.size = torch.tensor([[len(federation.train[i])] for i in who], dtype=self.dtype)
        self.iterations = torch.ones_like(self.size)

    def open(self, start: Tensor, part: Part, mask: Tensor | None = None) -> Tensor:
        return start.clone(memory_format=torch.contiguous_format)

    # A batch may hold the first clients of the stack only: the others are done.

    def gradient(
        self, v: Tensor, batch: Batch, part: Part, term: LossTerm | None = None, term_only: bool = False
    ) -> Tensor:
        first = len(batch.x)
        found = self.module.gradient(v[:first], batch, part, term, term_only)
        return found if first == len(v) else nn.functional.pad(found, (0, 0, 0, len(v) - first))

    def step(self, v: Tensor, batch: Batch, part: Part, lr: float, term: LossTerm | None = None) -> None:
        self.module.step(v[: len(batch.x)], batch, part, lr, term)

    def shares(self, batch: Batch) -> Tensor:
        assert batch.weights is not None  # 1 / (samples in the batch), or 0
        counts = (batch.weights > 0).sum(1, keepdim=True)
        return nn.functional.pad(counts, (0, 0, 0, len(self.size) - len(counts))) / self.size

    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        scoring, found = self.module.scoring, []
        for who, row in zip(self.who, v, strict=True):
            x, y = self.federation.gather(torch.from_numpy(self.federation.train[who]))
            call = partial(functional_call, scoring, self.space.views(row))
            found.append(client_class_sums(self.task, call, scoring, x, y, of, at))
        return torch.stack(found)

    def moments(self, v: Tensor, *, groups: int = 1, of: DataSplit = "train") -> Moments:
        scoring, found = self.module.scoring, []
        for who, row in zip(self.who, v, strict=True):
            x, y = self.federation.gather(torch.from_numpy(getattr(self.federation, of)[who]))
            views = self.space.views(row)
            call = partial(functional_call, scoring, views)
            found.append(client_moments(self.module.task, call, scoring, x, y, groups))
        return Moments.stack(found)

    def batches(
        self, epochs: int, steps: int | None, stream: int | None, active: Tensor | None, term: LossTerm | None = None
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        owned = [self.federation.train[i] for i in self.who]
        batch = min(self.algorithm.batch, max(len(indices) for indices in owned))
        plans = []
        works = [True] * len(owned) if active is None else active.flatten().tolist()
        for i, indices, at_work in zip(self.who, owned, works, strict=True):
            rng = batch_order(self.seed, self.round, self.federation.names[i], self.purpose, stream)
            plans.append(batch_indices(len(indices) if at_work else 0, batch, epochs, steps, rng))
        length = max(len(p) for p in plans)
        # Where a batch is not full, a sample of the client's own stands in, with weight zero.
        own = np.array([indices[0] for indices in owned])
        order = np.broadcast_to(own[:, None], (length, len(plans), batch)).copy()
        there = np.zeros(order.shape, dtype=bool)
        for k, (p, indices) in enumerate(zip(plans, owned, strict=True)):
            there[: len(p), k] = p >= 0
            order[: len(p), k] = np.where(p >= 0, indices[p], indices[0])
        counts = there.sum(-1, keepdims=True)
        self.samples += counts.sum((0, 2))
        weights = torch.from_numpy(there / np.maximum(counts, 1)).to(self.dtype)
        done = torch.from_numpy(counts[..., 0] == 0)
        someone = done.any(1).tolist()
        firsts = active_prefix_sizes(counts[..., 0] > 0)
        flat = torch.from_numpy(order).flatten(1)
        for t, first in zip(range(length), firsts, strict=True):
            x, y = self.federation.gather(flat[t, : first * batch], self.module.memory)
            lead = (first, batch)
            batch_t = Batch(x.unflatten(0, lead), y.unflatten(0, lead), weights[t, :first])
            yield batch_t, done[t] if someone[t] else None


def active_prefix_sizes(at_work: np.ndarray) -> list[int]:
    """For each step, how many of the first clients to compute: up to the last one at work, in few different numbers.

    Clients are stacked with the longest plans first, so that those who are done lie at the end. Every number of
    clients is a trace of its own; with steps of a quarter there are few.
    """
    clients = at_work.shape[1]
    sizes = [clients]
    while sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] * 3 // 4))
    levels = np.array(sizes[::-1])
    last = clients - np.argmax(at_work[:, ::-1], axis=1)
    return levels[np.searchsorted(levels, last)].tolist()  # type: ignore[no-any-return]


def groups(items: Sequence[int], limit: int = _GROUP) -> list[list[int]]:
    """As few even groups as the limit allows; the cut depends on the number of items alone."""
    return [part.tolist() for part in np.array_split(np.array(items, dtype=np.int64), -(-len(items) // limit))]


class StackedExecutor(Executor):
    """Trains a stack of clients per call."""

    mode: ClassVar[str] = "stacked"

    def __init__(
        self,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        seed: int,
        workers: int,
        compiled: bool = False,
    ):
        super().__init__(task, federation, algorithm, seed, workers)
        if (why := task.why_not_stacked) is not None:
            raise EquipoiseError(f"engine.mode = 'stacked' is not possible here, because {why}; use 'threads'")
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(workers)
        self.module = StackedModule(task, compiled)

    def close(self) -> None:
        torch.set_num_threads(self.threads_before)

    def _groups(self, jobs: Sequence[ClientJob]) -> list[list[ClientJob]]:
        """Jobs whose clients take about equally many steps together, so that few stand and wait."""
        if not jobs:
            return []
        lengths = self.federation.train.lengths
        order = sorted(range(len(jobs)), key=lambda k: (-lengths[jobs[k].who], self.federation.names[jobs[k].who]))
        return [[jobs[order[k]] for k in group] for group in groups(range(len(jobs)))]

    def _cohort(self, round: int, group: list[ClientJob], purpose: str) -> StackedTrainer:
        who = [job.who for job in group]
        return StackedTrainer(self.module, self.federation, self.algorithm, self.seed, round, who, purpose)

    def train(self, round: int, jobs: Sequence[ClientJob], stopped: Callable[[], bool]) -> Iterator[ClientResult]:
        done: dict[int, ClientResult] = {}
        for group in self._groups(jobs):
            if stopped():
                break
            work = self._cohort(round, group, "batches")
            with torch.no_grad():
                client, upload = self.algorithm.local_update(
                    stack_states([job.held for job in group]), stack([job.down for job in group]), work
                )
            all_finite = client.finite() and upload.wire.finite()
            for k, job in enumerate(group):
                sent = upload.row(k)
                finite = all_finite or (client.row(k).finite() and sent.wire.finite())
                done[job.who] = ClientResult(job.who, StackRow(client, k), sent, int(work.samples[k]), finite)
        yield from (done[job.who] for job in jobs if job.who in done)

    @torch.no_grad()
    def models(
        self, round: int, jobs: Sequence[ClientJob], kind: ModelKind
    ) -> Iterator[tuple[ClientModel | None, int]]:
        make, looks_up = self.maker(kind), self.looks_up(kind)
        found: dict[int, tuple[ClientModel | None, int]] = {}
        for group in self._groups(jobs):
            work = self._cohort(round, group, "unseen" if kind == "unseen" else "adapt")
            clients, downs = stack_states([job.held for job in group]), stack([job.down for job in group])
            vectors = make(clients, downs, work)
            for k, job in enumerate(group):
                model = None if vectors is None else ClientModel(job.who, vectors[k], looks_up=looks_up)
                found[job.who] = model, int(work.samples[k])
        yield from (found[job.who] for job in jobs)

    @torch.no_grad()
    def score(self, models: Sequence[ClientModel], indices: Sequence[np.ndarray]) -> Iterator[SampleScores]:
        scores: list[SampleScores] = [np.empty((2, len(own))) for own in indices]
        for k, model in enumerate(models):
            if model.looks_up and len(indices[k]):  # its samples are its own, so that it is asked by itself
                module = self.predictor(self.task.to_module(model.vector), model.who)
                scores[k] = self._pieces(module, indices[k])
        stacks = [k for k, model in enumerate(models) if not model.looks_up]
        order = sorted(stacks, key=lambda k: (-len(indices[k]), self.federation.names[models[k].who]))
        for group in groups(order) if order else []:
            views = self.task.space.views(torch.stack([models[k].vector for k in group]))
            for first in range(0, max(len(indices[k]) for k in group), _SCORE_BATCH):
                rows = [indices[k][first : first + _SCORE_BATCH] for k in group]
                width = max(len(row) for row in rows)
                padded = np.zeros((len(group), width), dtype=np.int64)
                for k, row in enumerate(rows):
                    padded[k, : len(row)] = row
                x, y = self.federation.gather(torch.from_numpy(padded.reshape(-1)))
                outputs = vmap(lambda p, x: functional_call(self.module.scoring, p, (x,)))(
                    views, x.unflatten(0, padded.shape)
                ).flatten(0, 1)
                both = self._each(outputs, y).reshape(2, len(group), width)
                for k, row in enumerate(rows):
                    scores[group[k]][:, first : first + len(row)] = both[:, k, : len(row)]
        yield from scores

    @torch.no_grad()
    def score_one(self, vector: Tensor, indices: np.ndarray) -> SampleScores:
        if not len(indices):
            return np.empty((2, 0))
        views = self.task.space.views(vector)
        return self._pieces(lambda x: functional_call(self.module.scoring, views, (x,)), indices)

    def _pieces(self, predict: Callable[[Tensor], Tensor], indices: np.ndarray) -> SampleScores:
        scored = []
        for piece in np.array_split(indices, max(1, -(-len(indices) // 4096))):
            x, y = self.federation.gather(torch.from_numpy(piece))
            scored.append(self._each(predict(x), y))
        return np.concatenate(scored, axis=1)

    def _each(self, output: Tensor, y: Tensor) -> SampleScores:
        assert self.task.loss.each is not None
        return np.stack(
            [self.task.loss.each(output, y).double().numpy(), self.task.metric.each(output, y).double().numpy()]
        )
