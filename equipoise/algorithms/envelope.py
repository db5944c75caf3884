"""The base of algorithms whose personal models minimise f(theta) + lam/2 ||theta - w||^2, a Moreau envelope."""

from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import LocalData
from equipoise.settings import Positive
from equipoise.state import State


class Envelope(Algorithm):
    """A personal model theta, kept by the client and pulled towards w.

    What clients agree on is `seen`: the whole model, or a projection of it (`lp_proj.py`).
    """

    lam: Positive = 1.0
    "strength of the pull of the personal model towards the client's copy of the global model"

    def pull(self, theta: Tensor, w: Tensor, data: LocalData) -> Tensor:
        """Return the gradient of lam/2 ||seen(theta) - w||^2."""
        return self.back(self.lam * (self.seen(theta, data.seed) - w), data)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.theta

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        begin = self.begins(client, down)
        return data.descend(begin, epochs=self.adapt_epochs, pull=lambda theta: self.pull(theta, down.w, data))

    def global_model(self, server: State) -> Tensor | None:
        return server.w

    def seen(self, theta: Tensor, seed: int) -> Tensor:
        """Return what clients agree on: the model, or a projection of it."""
        return theta

    def back(self, pull: Tensor, data: LocalData) -> Tensor:
        """Apply the transpose of `seen`, from the space of what is seen to that of the model."""
        return pull

    def begins(self, client: State, down: State) -> Tensor:
        """Return the model that a client which took no part in training adapts."""
        return down.w
