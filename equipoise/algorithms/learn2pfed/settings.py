"""Learn2pFed's settings, and what they make: the layout of the learnables, the cells, the rules of steps."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from equipoise.algorithms.base import Algorithm, Requirements
from equipoise.algorithms.learn2pfed.cells import Cells
from equipoise.algorithms.learn2pfed.head import Trials
from equipoise.algorithms.learn2pfed.learnables import Descent, Layout, layout
from equipoise.algorithms.learn2pfed.server import Server
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.head_problem import GroupOrder
from equipoise.settings import Count, NonNegative, Positive

Family = Literal["lam", "p", "rho", "eta", "gamma", "theta"]
OfClients = Literal["lam", "rho", "eta", "theta"]


class Learn2pFedSettings(Algorithm):
    """The settings of Learn2pFed."""

    cells: Count = 10
    "number of unrolled iterations of ADMM (L)"
    sets: Literal["shared", "each"] = "shared"
    "one set of learnables for all cells, or one per cell"
    learn: tuple[Family, ...] = ("lam", "p", "rho", "eta", "gamma", "theta")
    "families of learnables that are learned; the others keep their initial values"
    tied: tuple[OfClients, ...] = ()
    "families with one value for all clients, learned from the sum of their gradients"
    follow: tuple[Literal["eta", "theta"], ...] = ()
    "families that equal the client's rho, the one symbol that the paper prints for them"
    outer: Literal["train", "validation", "folds"] = "train"
    "samples on which the learnables are judged: those that heads are fitted to, validation samples, or held-out folds"
    folds: Annotated[int, Field(ge=2, le=100)] = 5
    "number of parts of the training samples with outer = 'folds', each held out in a network of its own"
    fold_order: GroupOrder = "auto"
    "samples of a fold: each k-th one, a block of consecutive ones, or auto: blocks where the data are in order of time"
    backward: Literal["exact", "local"] = "exact"
    "exact: adjoints are sent, cell by cell; local: each client treats w as constant, and p and gamma are not learned"
    warm: bool = False
    "start an epoch where the last one ended, instead of at zero"
    lam: Positive = 0.001
    "initial scale of Λ, times a random number from 0 to 1 for each parameter, the same for all clients"
    draw: bool = True
    "draw these random numbers; otherwise they are 1"
    positive: Literal["relu", "log"] = "relu"
    "form of Λ: max(0, .), which may stay at 0, or exp(.)"
    rho: Positive = 0.01
    "initial constant in the update of v"
    eta: Positive = 0.01
    "initial constant in the update of z"
    gamma: Positive = 0.01
    "initial constant in the update of w"
    theta: Positive = 0.01
    "initial constant in the update of alpha"
    fit: Literal["squares", "loss"] = "squares"
    "what heads are fitted to and judged by: squared errors (of classes as 0 and 1), or the task's own loss"
    solve: Literal["closed", "gradient"] = "closed"
    "update of v: in closed form (Eq. 10), or by gradient steps on the same problem (Eq. 14)"
    solve_steps: Count = 10
    "number of steps with solve = 'gradient'"
    solve_rate: Positive = 1.0
    "learning rate of these steps, in units of one over the problem's smoothness; for your own loss that is a guess"
    outer_lr: Positive = 0.01
    "learning rate of the learnables"
    outer_optimizer: Literal["sgd", "adam"] = "sgd"
    "update rule of the learnables"
    outer_clip: NonNegative = 1.0
    "largest norm of the gradient of a client's, or the server's, learnables; 0: no limit"
    decay_after: Count = 60
    "number of a client's epochs before outer_lr is reduced"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    "factor by which outer_lr is then multiplied"
    network: Literal["alternate", "joint"] = "alternate"
    "training of the body: locally, before heads are fitted; or a step per epoch by the gradient through all cells"
    train: Literal["body", "all"] = "body"
    "what local training changes before v is fitted again: the body under the head v, or the whole network"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, linear_head=True, validation=self.outer == "validation")

    @model_validator(mode="after")
    def _gradients_travel(self) -> Self:
        if self.tied and self.backward != "exact":
            raise ValueError("tied needs backward = 'exact', because otherwise no gradients are sent")
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if self.fit == "loss" and self.solve == "closed":
            raise ValueError("fit = 'loss' has no closed solution; it needs solve = 'gradient'")
        if self.fit == "squares" and self.solve_rate >= 2:
            raise ValueError("solve_rate must be below 2 with fit = 'squares', because steps diverge otherwise")
        return self

    @property
    def _trials(self) -> Trials:
        return Trials(self.fit, self.outer, self.folds, self.fold_order)

    @property
    def _sets(self) -> int:
        return 1 if self.sets == "shared" else self.cells

    def _layout(self, space: ParameterSpace) -> Layout:
        return layout(space, self._sets)

    def _cells(self, space: ParameterSpace) -> Cells:
        steps = (self.solve_rate, self.solve_steps)
        return Cells(self._layout(space), self.solve, *steps, self.positive, self.follow)

    @property
    def _descent(self) -> Descent:
        return Descent(self.outer_optimizer, self.outer_lr, self.outer_clip, self.decay_after, self.decay)

    @property
    def _server(self) -> Server:
        return Server(self.cells, self._sets, self.learn, bool(self.tied), self._descent)
