"""FedBABU: a common body, trained with a fixed random head; every client fine-tunes the result."""

from typing import ClassVar

from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.parameter_space import ParameterSpace, Part
from equipoise.settings import Count, Positive
from equipoise.state import State, Upload, Uploads


class FedBABU(Algorithm):
    """The body is trained and averaged with a fixed random head; then every client fine-tunes the model.

    theta_ext: the common body; theta_cls: the initial head, the same for all. With an empty head it is FedAvg+FT.
    """

    paper: ClassVar[str] = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022"
    averaged: ClassVar[tuple[str, ...]] = ("theta_ext",)

    finetune_epochs: Count = 5
    "passes over the client's data that fine-tune the global model"
    finetune_part: Part = "all"
    "part of the model that is fine-tuned: all, head or body"
    finetune_lr: Positive | None = None
    "learning rate of fine-tuning; by default lr"

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True)

    def init_server(self, start: Start) -> State:
        return State(theta_ext=start.space.body(start.w0), theta_cls=start.space.head(start.w0))

    def init_client(self, start: Start) -> State:
        return State(theta_cls=start.space.head(start.w0))

    def broadcast(self, server: State, client: int) -> State:
        return State(theta_ext=server.theta_ext)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        theta = data.descend(data.space.join(down.theta_ext, client.theta_cls), part="body")
        return client, Upload(State(theta_ext=data.space.body(theta)), reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return State(theta_ext=reduce(uploads).theta_ext, theta_cls=server.theta_cls)

    def _tuned(self, client: State, down: State, data: LocalData, epochs: int) -> Tensor:
        theta = data.space.join(down.theta_ext, client.theta_cls)
        return data.descend(theta, part=self.finetune_part, epochs=epochs, lr=self.finetune_lr)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._tuned(client, down, data, self.finetune_epochs)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return self._tuned(client, down, data, self.adapt_epochs)

    def global_model(self, server: State) -> Tensor:
        return ParameterSpace.join(server.theta_ext, server.theta_cls)
