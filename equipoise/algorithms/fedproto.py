"""FedProto: clients share the centres of classes among their features, and no parameters."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.algorithms._prototypes import Alignment, next_centres, with_count
from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.representations.linear_head import linear_head
from equipoise.representations.points import HEAD
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads

_NEVER = 1e12  # how far below all others the output of a class without a prototype is


class FedProto(Algorithm):
    """Features of a class are pulled towards its prototype, the mean over clients; models stay private.

    w: a client's model; c: the prototypes of all classes (C-bar in the paper); n: a client's samples by class. lam = 0
    is Local. Prototypes are computed after training, with the trained model; published code collects them during it.
    The paper prints a further factor 1 / |N_c|, which would shrink prototypes and is in no code; it is left out. A
    class that nobody has in a round keeps its prototype.
    """

    paper: ClassVar[str] = "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"

    lam: NonNegative = 1.0
    "strength of the pull of features towards the prototype of their class"
    weigh: Literal["samples", "clients"] = "samples"
    "a client's weight in a class's prototype: its samples of the class, as in the paper, or 1, as in published code"
    predict: Literal["prototypes", "head"] = "prototypes"
    "the nearest prototype, for which the head must be a linear layer with a bias, or the client's own head"

    @property
    def requires(self) -> Requirements:
        nearest = self.predict == "prototypes"
        return Requirements(head=True, head_module=True, linear_head=nearest, labels=True)

    def init_server(self, start: Start) -> State:
        if self.predict == "prototypes" and not linear_head(start.space).bias:
            raise EquipoiseError(
                "FedProto writes the nearest prototype as a linear layer with a bias, and the model's head has none; "
                "give it one, or say algorithm.predict = 'head'"
            )
        classes, width = start.outputs, start.point(HEAD).width
        return State(c=start.w0.new_zeros((classes, width)), known=start.w0.new_zeros(classes))

    def init_client(self, start: Start) -> State:
        return State(w=start.w0)

    def _trained(self, w: Tensor, down: State, data: LocalData, epochs: int | None = None) -> Tensor:
        pull = Alignment(given=State(c=down.c, weight=self.lam * down.known))
        return data.descend(w, epochs=epochs, term=pull if self.lam else None)

    def origin(self, server: State) -> None:
        return None  # statistics of a client are not known beforehand

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w = self._trained(client.w, down, data)
        found = data.class_sums(w, with_count)
        sums, n = found[..., :-1], found[..., -1]
        if self.weigh == "clients":
            sums, n = sums / n.clamp(min=1).unsqueeze(-1), (n > 0).to(n.dtype)
        return State(w=w), Upload(State(sums=sums, n=n))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return next_centres(server, reduce(uploads))

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.w if self.predict == "head" else self._nearest(client.w, down, data)

    def _nearest(self, w: Tensor, down: State, data: LocalData) -> Tensor:
        """Return w with the head that computes 2 <h, c> - |c|^2, which is largest for the nearest prototype."""
        known = down.known > 0
        weight = (2 * down.c * known.unsqueeze(-1)).mT
        bias = torch.where(known, -down.c.square().sum(-1), -_NEVER)
        head = linear_head(data.space).vector(torch.cat([weight, bias.unsqueeze(-2)], dim=-2))
        return data.space.join(data.space.body(w), head)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        w = self._trained(client.w, down, data, self.adapt_epochs)
        return w if self.predict == "head" else self._nearest(w, down, data)
