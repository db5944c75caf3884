"""Shared least squares: linear heads with some coefficients in common, solved exactly in one exchange."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from equipoise.algorithms._ridge import Reduced, eliminate, packed, solution, unpacked
from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import UsesLastUploads
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.linear_head import linear_head
from equipoise.settings import MOST
from equipoise.state import State, Upload, Uploads
from equipoise.torch_device import widened


class SharedLeastSquares(UsesLastUploads, Algorithm):
    """Linear heads with some coefficients common to all clients: the least squares of all together, in one exchange.

    X: what the head reads, the body staying at its initial values, with a last column of ones if the head has a bias;
    Y: the targets; v: a client's head; w: the rows of v that are shared. A client eliminates its other coefficients and
    sends S and b, the moments of w that remain (a Schur complement); the server solves (sum S) w = sum b; and the best
    other coefficients for w are in closed form again. Where the data leave several solutions, w has the least norm, and
    so have the others for w.
    """

    paper: ClassVar[str] = "Frisch and Waugh, Partial Time Regressions, Econometrica, 1933; one block after the other"

    shared: tuple[Annotated[int, Field(ge=0, le=MOST)] | Literal["bias"], ...] = (0,)
    'inputs of the head whose coefficients all clients share, numbered from 0, and "bias"; all others are their own'

    @property
    def requires(self) -> Requirements:
        return Requirements(head=True, linear_head=True)

    def _rows(self, space: ParameterSpace) -> list[int]:
        """Return the rows of the head's matrix that are shared, in ascending order."""
        head = linear_head(space)
        known = [*range(head.inputs - head.bias), *(["bias"] if head.bias else [])]
        if len(set(self.shared)) < len(self.shared) or not set(self.shared) <= set(known):
            there = f"{head.inputs - head.bias} inputs, numbered from 0, and {'a' if head.bias else 'no'} bias"
            raise EquipoiseError(
                f"algorithm.shared = {list(self.shared)} is not allowed; the model's head has {there}, and each may be "
                "named once"
            )
        return sorted(map(known.index, self.shared))

    def init_server(self, start: Start) -> State:
        return State(w=linear_head(start.space).matrix(start.space.head(start.w0))[self._rows(start.space)])

    def init_client(self, start: Start) -> State:
        return State(start=start.w0)

    def initial_upload(self, start: Start) -> State:
        w = widened(self.init_server(start).w)
        return State(S=packed(w.new_zeros(len(w), len(w))), b=torch.zeros_like(w))

    def origin(self, server: State) -> None:
        return None  # moments are no change of anything

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        reduced = self._reduced(client, data)
        return client, Upload(State(S=packed(reduced.xx), b=reduced.xy))

    def _reduced(self, client: State, data: LocalData) -> Reduced:
        m = data.moments(client.start)
        return eliminate(m.xx.squeeze(-3), m.xy.squeeze(-3), self._rows(data.space))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        mean = reduce(uploads)  # over all clients' last moments
        return State(w=solution(unpacked(mean.S, len(mean.b)), mean.b).to(server.w.dtype))

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        v = self._reduced(client, data).completed(widened(down.w))
        head = linear_head(data.space).vector(v).to(client.start.dtype)
        return data.space.join(data.space.body(client.start), head)

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return self.personal_model(client, down, data)
