"""What an algorithm can know and do: the start of a run, and one client's data as a set of operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.metrics import AnyMetric
from equipoise.optimizers import Rate
from equipoise.parameter_space import ParameterSpace, Part
from equipoise.representations.head_moments import Moments
from equipoise.representations.head_problem import GroupOrder, HeadProblem
from equipoise.representations.points import HEAD, RepresentationPoint
from equipoise.representations.terms import LossTerm
from equipoise.state import State

DataSplit = Literal["train", "validation"]
PointLookup = Callable[[str], RepresentationPoint]


def _no_points(name: str) -> RepresentationPoint:
    raise EquipoiseError("only the parameters of the model are known here, so no representation can be read")


@dataclass(frozen=True)
class Start:
    """What is known before the first round."""

    space: ParameterSpace
    w0: Tensor
    "the common initial model"
    clients: int
    "number of clients that train; the server knows them as 0 to clients - 1, and newcomers by larger numbers"
    samples: int = 0
    "number of training samples of all clients together"
    seed: int = 0
    "seed of the run, for what is drawn once and is the same for everybody"
    outputs: int = 0
    "number of outputs of the model: classes, or numbers to predict"
    point: PointLookup = _no_points
    "looks up a representation point by the name of a submodule, HEAD or OUTPUT"


class BatchGradient(Protocol):
    """Gradients on the batches of one step of `LocalData.walk`."""

    def __call__(self, v: Tensor, which: int = 0, /) -> Tensor:
        """Return the gradient at the model v of the mean loss of one of the step's batches, with weight decay.

        Args:
            v: the model.
            which: number of the batch in the step, from 0.
        """


class LocalData(Protocol):
    """One client's data as an algorithm sees it: operations on the data, never the data themselves.

    The same lines run for one client, with vectors of shape (P,), and for a stack of clients, (cohort, P).
    """

    space: ParameterSpace
    seed: int
    "seed of the run"
    round: int
    "number of the round, from 1"

    @property
    def outputs(self) -> int:
        """Return the number of outputs of the model: classes, or numbers to predict."""

    @property
    def size(self) -> Tensor:
        """Return the number of training samples, of shape (1,), or (cohort, 1)."""

    @property
    def class_counts(self) -> Tensor:
        """Return the number of training samples of each class, of shape (outputs,), or (cohort, outputs)."""

    @property
    def lr(self) -> float:
        """Return the learning rate of the round: the algorithm's own times the factor of its schedule."""

    def rate(self, lr: Rate | None) -> Rate:
        """Return a learning rate, by default the algorithm's own, times the factor of the schedule for the round."""

    @property
    def local_steps(self) -> Tensor:
        """Return the number of steps of `descend` with the algorithm's own epochs or steps, of the shape of `size`."""

    @property
    def iterations(self) -> Tensor:
        """Return the iteration limit of equilibrium solves on this client's device, of the shape of `size`.

        It is 1 where the model has no equilibrium layer.
        """

    @property
    def iterations_performed(self) -> Tensor:
        """Return the mean number of iterations of the client's forward solves in this round so far.

        It has the shape of `size`, is at most `iterations`, and is 1 where nothing was solved.
        """

    def point(self, name: str) -> RepresentationPoint:
        """Look up a representation point by the name of a submodule, HEAD or OUTPUT."""

    def descend(
        self,
        start: Tensor,
        *,
        part: Part | Tensor = "all",
        pull: Callable[[Tensor], Tensor] | None = None,
        term: LossTerm | None = None,
        lr: Rate | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        repeat: int = 1,
        stream: int = 0,
        active: Tensor | None = None,
    ) -> Tensor:
        """Train from `start` by gradient steps, and return the result; `start` does not change.

        Args:
            start: the vector to start from.
            part: what is trained: "all", "body", "head", or a mask of the vector's shape that multiplies the gradient,
                such as `space.mask("bn*")`.
            pull: is added to the gradient: a proximal or a dual term, as a function of the vector.
            term: is added to the loss, of each sample or (a `BatchTerm`) of each batch; its gradient is
                variance-reduced if it has an anchor.
            lr: learning rate, a number or a tensor of the shape of `size`; by default the algorithm's own. In training,
                the schedule's factor for the round multiplies it.
            epochs: passes over the training samples; by default the algorithm's own.
            steps: number of batches, in place of epochs.
            repeat: number of steps on each batch.
            stream: calls with the same number see the same batches in the same order within a round.
            active: mask of the shape of `size`; clients outside it do not move.
        """

    def walk(
        self,
        start: State,
        step: Callable[[State, BatchGradient], State],
        *,
        batches: int = 1,
        term: LossTerm | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        stream: int = 0,
        active: Tensor | None = None,
        size: int | None = None,
        portion: float = 1.0,
    ) -> State:
        """Move several vectors in lock-step on the same batches, by steps of the algorithm's own; return the last ones.

        `step` gets the vectors and a function `grad`, and returns the next vectors. `grad(v)` is the gradient at v of
        the mean loss of the step's batch, `grad(v, k)` that of its k-th batch. Weight decay is part of it (unless it
        is that of AdamW); optimizer, momentum and clip are not, so that an algorithm refuses what its steps ignore.
        Steps may not differ in how often they ask for the gradient on which batch.

        Args:
            start: the vectors to start from, and whatever else changes in a step. Those of a model's shape are models:
                constraints of the model hold after each step, and the k-th of them gets the BatchNorm statistics that
                the k-th gradient of every step leaves.
            step: computes the next vectors.
            batches: number of batches in a step, each from an order of its own. The first of them are those of
                `descend` with the same stream.
            term: a term whose mean takes the place of the loss.
            epochs: passes over the training samples, for each of the `batches`; by default the algorithm's own.
            steps: number of steps, in place of epochs.
            stream: calls with the same number see the same batches in the same order within a round.
            active: mask of the shape of `size`; the vectors of clients outside it do not change.
            size: number of samples in a batch; by default the algorithm's own.
            portion: share of the samples that a pass sees, drawn again for each pass of a call.
        """

    def reinitialised(self, v: Tensor) -> Tensor:
        """Return the initial model v as another initialisation would give it, drawn for the client once in a run.

        The entries of every parameter are in another order (see `ParameterSpace.shuffled`).
        """

    def loss(self, v: Tensor, *, of: DataSplit = "train") -> Tensor:
        """Return the mean loss of v over all samples, of the shape of `size`; zero for a client that has none.

        The model predicts as when it is scored, without dropout, and auxiliary losses of its layers do not count.

        Args:
            v: the model.
            of: which samples.
        """

    def full_gradient(self, v: Tensor, *, active: Tensor | None = None) -> Tensor:
        """Return the gradient at v of the mean loss over all training samples; zero outside `active`."""

    def gradient_squares(self, v: Tensor) -> Tensor:
        """Return the sum over batches of |gradient of the batch's mean loss at v|^2, of the shape of `size`.

        The batches are those of one pass of `descend`, without dropout.
        """

    def term_gradient(self, term: LossTerm, v: Tensor, *, steps: int | None = None, stream: int = 0) -> Tensor:
        """Return the gradient at v of the mean of `term` alone, over all training samples or over `steps` batches.

        Of a `BatchTerm` it is the mean over batches, by their numbers of samples.
        """

    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        """Sum `of(representations)` over the training samples of each class.

        Args:
            v: the model whose representations are used.
            of: takes a row per sample to a row per sample.
            at: the representation point.

        Returns:
            A tensor of shape (outputs, columns), or (cohort, outputs, columns).
        """

    def moments(self, v: Tensor, *, groups: int = 1, order: GroupOrder = "auto", of: DataSplit = "train") -> Moments:
        """Return the second moments of what v's head reads, which is all that a least-squares fit of it needs.

        Args:
            v: the model.
            groups: number of groups into which the samples are divided.
            order: how they are divided. For a block of windows of time series, windows outside of it that forecast a
                value which one in it forecasts too are marked as purged.
            of: which samples.
        """

    def head_problem(
        self, v: Tensor, *, groups: int = 1, order: GroupOrder = "auto", of: DataSplit = "train"
    ) -> HeadProblem:
        """Return the task's loss as a function of the head's matrix, with the features that v's body makes.

        The head must be one linear layer, and the last one. The arguments are those of `moments`.
        """

    def body_gradient(
        self,
        v: Tensor,
        objective: Callable[..., Tensor],
        *,
        groups: int = 1,
        order: GroupOrder = "auto",
        of: Sequence[DataSplit] = ("train",),
    ) -> Tensor:
        """Return the gradient at v of a function of its head's problems, through the features that v's body makes.

        Features are computed as for predictions, without dropout. The result is zero in the head's part.

        Args:
            v: the model.
            objective: returns a number per client from one `HeadProblem` for each entry of `of`.
            groups: number of groups into which the samples are divided.
            order: how they are divided.
            of: which samples the problems are made of.
        """


@dataclass(frozen=True)
class ClientSamples:
    """The client's own samples as pairs (x, y), for models that look them up when they predict."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    head: str
    "name of the submodule that is the model's head"
    metric: AnyMetric
