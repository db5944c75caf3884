"""FedALA: before training, each client learns how much of the global model to take, parameter by parameter."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import BatchGradient, LocalData, Start
from equipoise.parameter_space import ParameterSpace
from equipoise.settings import Count, NonNegative, Positive
from equipoise.state import State, Upload, Uploads


class FedALA(Algorithm):
    """FedAvg whose clients begin between their last model and the global one, where their loss is small.

    theta: the global model; theta_i: client i's last model; start: what it begins to train with, on the last `p` layers
    theta_i + W (theta - theta_i) with a weight W from 0 to 1 for each parameter, elsewhere theta. W is 1 at first, and
    is learned by gradient steps on a part of the samples. With eta = 0 or p = 0 it is FedAvg. A newcomer has no model
    to mix with, and adapts as in FedAvg.
    """

    paper: ClassVar[str] = "Zhang et al., FedALA: Adaptive Local Aggregation, AAAI 2023, Alg. 1"
    averaged: ClassVar[tuple[str, ...]] = ("theta",)

    eta: NonNegative = 1.0
    "learning rate of W"
    p: Annotated[int, Field(ge=0, le=10_000)] = 1
    "number of layers, from the output, that are mixed"
    portion: Annotated[float, Field(gt=0, le=1)] = 0.8
    "share of the samples on which W is learned, drawn in each round"
    threshold: Positive = 0.01
    """W is learned in one pass, but the first time until the loss has settled: until its standard deviation over the
    last passes is below this; the paper has 0.01, its code 0.1"""
    settled_passes: Annotated[int, Field(ge=2, le=1000)] = 10
    "number of these last passes"
    most_passes: Count = 100
    "largest number of passes the first time, which is ours"
    predict: Literal["trained", "start"] = "trained"
    "the personal model: the client's last trained model; or, as published code scores, what it would begin with now"

    def _upper(self, space: ParameterSpace) -> Tensor:
        """Return the mask of the last `p` layers."""
        layers = list(dict.fromkeys(entry.name.rpartition(".")[0] for entry in reversed(space.entries)))[: self.p]
        mask = torch.zeros(space.size, dtype=torch.bool, device=space.device)
        for entry in space.entries:
            mask[entry.offset : entry.end] = entry.name.rpartition(".")[0] in layers
        return mask

    def init_server(self, start: Start) -> State:
        return State(theta=start.w0)

    def init_client(self, start: Start) -> State:
        W = torch.ones_like(start.w0[self._upper(start.space)])
        return State(theta=start.w0, W=W, begun=start.w0.new_zeros(1))

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        start, W, begun = self._start(client, down, data)
        theta_i = data.descend(start)
        return State(theta=theta_i, W=W, begun=begun), Upload(State(theta=theta_i), reference=down, weight=data.size)

    def _start(self, client: State, down: State, data: LocalData) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the client begins with, the learned W, and whether W has been learned by now."""
        upper = self._upper(data.space)
        own, common = client.theta[..., upper], down.theta[..., upper]
        apart = common - own
        start = data.space.merge(upper, torch.lerp(own, common, client.W), down.theta[..., ~upper])
        # A step of W by the chain rule, W - eta apart gradient, moves the mixture by -eta apart^2 gradient; and W is
        # between 0 and 1 where the mixture is between the two models.
        rate = self.eta * (down.theta - client.theta).square() * upper
        low, high = (extreme(down.theta, client.theta) for extreme in (torch.minimum, torch.maximum))

        def step(s: State, grad: BatchGradient) -> State:
            mixed = (s.start - rate * grad(s.start)).clamp(low, high)
            return State(start=torch.where(rate > 0, mixed, s.start))

        active = (rate > 0).any(-1, keepdim=True)  # there is something to learn
        first, learning, losses = client.begun == 0, active, []
        for _ in range(self.most_passes):
            here = State(start=start)
            start = data.walk(here, step, epochs=1, portion=self.portion, stream=1, active=learning).start
            if not bool(first.any()):
                break
            losses.append(data.loss(start))
            last = torch.stack(losses[-self.settled_passes :])
            settled = len(losses) > self.settled_passes and last.std(0, correction=0) < self.threshold
            learning = learning & first & ~torch.as_tensor(settled, device=first.device)
            if not bool(learning.any()):
                break
        W = torch.where(apart == 0, client.W, ((start[..., upper] - own) / apart).clamp(0, 1))
        return start, W, torch.maximum(client.begun, active.to(client.begun.dtype))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.theta if self.predict == "trained" else self._start(client, down, data)[0]

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return data.descend(down.theta, epochs=self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return server.theta
