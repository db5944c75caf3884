"""FedAS: the received body is first aligned with the client's own; clients weigh by their remaining gradients."""

from typing import ClassVar

import torch
from torch import Tensor

from equipoise.algorithms._prototypes import Alignment, with_count
from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import BatchGradient, LocalData, Start
from equipoise.optimizers import moved
from equipoise.settings import Count, NonNegative
from equipoise.state import State, Upload, Uploads


class FedAS(Algorithm):
    """FedPer, with an alignment before training and other weights.

    theta: the common body; w: a client's whole model, whose head is personal; P: the mean features of its classes by
    its own last body, towards which it trains the received body before anything else; F: its weight, the sum over
    batches of |gradient of the batch's loss|^2 after training. F is no trace of the Fisher matrix, which would be a
    sum over samples, and a client that is near its optimum has a small one. The distance from P is a mean over
    samples, where the authors' code averages by class in a batch first.
    """

    paper: ClassVar[str] = "Yang, Huang, Ye, FedAS: Bridging Inconsistency in Personalized FL, CVPR 2024"
    averaged: ClassVar[tuple[str, ...]] = ("theta",)

    align_lr: NonNegative = 0.01
    "learning rate of the alignment, by plain SGD; 0: none"
    align_epochs: Count = 1
    "passes of the alignment"
    align_batch: Count = 16
    "samples in a step of the alignment"

    @property
    def requires(self) -> Requirements:
        aligned = self.align_lr > 0
        return Requirements(head=True, head_module=aligned, labels=aligned)

    def init_server(self, start: Start) -> State:
        return State(theta=start.space.body(start.w0))

    def init_client(self, start: Start) -> State:
        return State(w=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w = data.descend(self._aligned(client, down, data))
        F = data.gradient_squares(w).clamp(min=torch.finfo(w.dtype).tiny)  # if all are zero, all weigh the same
        return State(w=w), Upload(State(theta=data.space.body(w)), reference=down, weight=F)

    def _aligned(self, client: State, down: State, data: LocalData) -> Tensor:
        """Return the received body, aligned with the client's own, with the client's head."""
        start = data.space.join(down.theta, data.space.head(client.w))
        if not self.align_lr:
            return start
        found = data.class_sums(client.w, with_count)
        P = found[..., :-1] / found[..., -1:].clamp(min=1)
        term = Alignment(given=State(c=P, weight=torch.ones_like(P[..., 0])))
        lr = data.rate(self.align_lr)

        def step(s: State, grad: BatchGradient) -> State:
            return State(w=moved(s.w, grad(s.w), lr))  # the head, on which features do not depend, does not move

        return data.walk(State(w=start), step, term=term, epochs=self.align_epochs, size=self.align_batch, stream=1).w

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)  # theta = sum F_i theta_i / sum F_i

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.w

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        start = data.space.join(down.theta, data.space.head(client.w))
        return data.descend(start, part="head", epochs=self.adapt_epochs)
