"""What methods share whose personal models minimise f(theta) + lam/2 ||theta - w||^2: a Moreau envelope."""

from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import LocalData
from equipoise.settings import Positive
from equipoise.state import State


class Envelope(Algorithm):
    """A personal model theta, kept by the client, pulled towards w.

    What of a model takes part in the agreement is `seen`: all of it, or a projection (`lp_proj.py`).
    """

    lam: Positive = 1.0
    "strength of the pull of the personal model towards the client's copy of the global one"

    def pull(self, theta: Tensor, w: Tensor, data: LocalData) -> Tensor:
        """The gradient of lam/2 ||theta - w||^2."""
        return self.back(self.lam * (self.seen(theta, data.seed) - w), data)

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        return client.theta

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        begin = self.begins(client, down)
        return data.descend(begin, epochs=self.adapt_epochs, pull=lambda theta: self.pull(theta, down.w, data))

    def global_model(self, server: State) -> Tensor | None:
        return server.w

    def seen(self, theta: Tensor, seed: int) -> Tensor:
        return theta

    def back(self, pull: Tensor, data: LocalData) -> Tensor:
        """From the space of what is seen to that of the model: the transpose of `seen`."""
        return pull

    def begins(self, client: State, down: State) -> Tensor:
        """Where the model of a client that took no part begins."""
        return down.w
