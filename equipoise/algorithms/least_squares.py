"""Least squares: linear heads in closed form, each client's own and the pooled one; a reference for other methods."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from equipoise.algorithms._ridge import fitted, packed, unpacked
from equipoise.algorithms.base import Algorithm, Reduce, Requirements
from equipoise.algorithms.capabilities import UsesLastUploads
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.head_moments import Moments
from equipoise.representations.linear_head import LinearHead, linear_head
from equipoise.settings import NonNegative
from equipoise.state import State, Upload, Uploads

_GRID = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
Ridge = NonNegative | Literal["validation"]


class LeastSquares(UsesLastUploads, Algorithm):
    """Linear heads in closed form: the pooled one, and personal ones by ridge regression towards it or towards zero.

    X: what the head reads, the body staying at its initial values, with a last column of ones if the head has a bias;
    Y: the targets; n: the number of samples; v: a client's head, the smallest |Xv - Y|² + r n |v - w|²; w: the pooled
    head, from the sums of X'X, X'Y and n over all clients. Towards zero, a bias is not penalised. With r = 0, v is the
    client's own least squares, the one nearest to w if several are. Nothing is trained by gradient steps.
    """

    paper: ClassVar[str] = "Hoerl and Kennard, Ridge Regression, Technometrics, 1970"

    towards: Literal["pooled", "zero"] = "pooled"
    "what ridge pulls personal heads to: the pooled head; or zero, where every client is alone and nothing is sent"
    ridge: Ridge = 0.0
    'strength r of the pull; 0: own least squares; "validation": each client chooses from grid on validation samples'
    pooled_ridge: Ridge = 0.0
    'strength of the pull of the pooled head towards zero; "validation": chosen from grid on all validation samples'
    refit: bool = False
    "whether heads, once r is chosen, are fitted to training and validation samples; these then judge them too kindly"
    grid: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = _GRID
    "values of r to choose from; without validation samples the first one is taken"

    def model_post_init(self, _: object) -> None:
        if self.pooled_ridge != 0 and self.towards == "zero":
            raise EquipoiseError(
                f"algorithm.pooled_ridge = {self.pooled_ridge!r} has no effect with algorithm.towards = 'zero', where "
                "there is no pooled head; leave it out"
            )

    @property
    def requires(self) -> Requirements:
        chosen = "validation" in (self.ridge, self.pooled_ridge)
        return Requirements(head=True, linear_head=True, validation=chosen or self.refit)

    @property
    def _pools(self) -> bool:
        return self.towards == "pooled"

    def _penalties(self, ridge: float | str) -> tuple[float, ...]:
        return (ridge,) if isinstance(ridge, float) else self.grid

    def _judge(self, ridge: float | str, client: State, data: LocalData) -> Moments | None:
        """Return the moments of the samples on which r is chosen, if it is."""
        return data.moments(client.start, of="validation") if ridge == "validation" else None

    def init_server(self, start: Start) -> State:
        if not self._pools:
            return State()
        bias = start.w0.new_tensor([linear_head(start.space).bias])
        return State(body=start.space.body(start.w0), w=start.space.head(start.w0), bias=bias)

    def init_client(self, start: Start) -> State:
        return State(start=start.w0)

    def initial_upload(self, start: Start) -> State | None:
        if not self._pools:
            return None
        nothing = Moments.none(*linear_head(start.space)[:2], like=start.w0)
        return _message(nothing, nothing if self.pooled_ridge == "validation" else None)

    def broadcast(self, server: State, client: int) -> State:
        return State(w=server.w) if self._pools else State()

    def origin(self, server: State) -> State | None:
        return None if self._pools else State()  # moments are no change of anything

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        if not self._pools:
            return client, Upload()
        judge = self._judge(self.pooled_ridge, client, data)
        return client, Upload(_message(data.moments(client.start), judge))

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        if not self._pools:
            return server
        message = reduce(uploads)  # of all clients' last moments; their mean has the same solution as their sum
        inputs, outputs = message.xy.shape
        head = LinearHead(inputs, outputs, bool(server.bias))

        def moments(xx: str, xy: str) -> Moments:
            matrix = unpacked(message[xx], head.inputs)
            return Moments(matrix.unsqueeze(0), message[xy].unsqueeze(0), message.n.reshape(1, 1, 1))

        judge = moments("judge_xx", "judge_xy") if self.pooled_ridge == "validation" else None
        w = fitted(moments("xx", "xy"), self._penalties(self.pooled_ridge), judge, bias=head.bias)
        return State(server, w=head.vector(w).to(server.w.dtype))

    def personal_model(self, client: State, down: State, data: LocalData) -> Tensor:
        head, judge = linear_head(data.space), self._judge(self.ridge, client, data)
        w = head.matrix(down.w) if self._pools else None
        train = data.moments(client.start)
        final = train + data.moments(client.start, of="validation") if self.refit else None
        v = fitted(train, self._penalties(self.ridge), judge, bias=head.bias, towards=w, final=final)
        return data.space.join(data.space.body(client.start), head.vector(v).to(client.start.dtype))

    def adapt(self, client: State, down: State, data: LocalData) -> Tensor:
        return self.personal_model(client, down, data)

    def global_model(self, server: State) -> Tensor | None:
        return ParameterSpace.join(server.body, server.w) if self._pools else None


def _message(train: Moments, judge: Moments | None) -> State:
    """Return what a client sends: its moments, and those of the samples on which the server chooses r."""
    message = State(n=train.n.flatten(-3), xx=packed(train.xx.squeeze(-3)), xy=train.xy.squeeze(-3))
    if judge is None:
        return message
    return State(message, judge_xx=packed(judge.xx.squeeze(-3)), judge_xy=judge.xy.squeeze(-3))
