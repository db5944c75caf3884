"""The shapes of all states and messages of an algorithm, found before the run by calling its hooks once."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import ReportsDiagnostics
from equipoise.algorithms.local_data import BatchGradient, LocalData, Start
from equipoise.errors import EquipoiseError
from equipoise.losses import LOSSES
from equipoise.optimizers import Rate
from equipoise.representations.head_moments import Moments
from equipoise.representations.head_problem import HeadProblem, HeadSamples
from equipoise.representations.linear_head import linear_head
from equipoise.representations.points import HEAD, RepresentationPoint
from equipoise.representations.terms import LossTerm
from equipoise.settings import nearest
from equipoise.state import State, Upload
from equipoise.torch_device import widened

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class MessageSchema:
    """The names, shapes and number formats of everything that is kept or sent."""

    server: Shapes
    client: Shapes
    down: Shapes
    up: Shapes
    parameters_shared: int
    parameters_personal: int
    weighs_samples: bool = False
    "whether the weight that a client sends is its number of training samples"
    weighs_iterations: bool = False
    "whether the weight that a client sends is a number of iterations of equilibrium solves"
    diagnostics: tuple[str, ...] = ()
    "numbers about its update that a client reports; none under privacy"
    references: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    "fields of the broadcast that a field of the upload is a change of, where the upload declares a reference"


def infer_schema(algorithm: Algorithm, start: Start, weighted: bool = True) -> MessageSchema:
    """Infer the schema of an algorithm.

    Args:
        algorithm: whose hooks are called.
        start: what is known before the first round.
        weighted: whether clients send their weights; they do not under privacy.
    """
    server = _tried(algorithm, "init_server", start)
    if unknown := set(algorithm.averaged) - server.keys():
        raise EquipoiseError(
            f"{type(algorithm).__name__}.averaged names {min(unknown)!r}, which is no field of the server's state; it "
            f"has {', '.join(sorted(server)) or 'none'}"
        )
    client = _tried(algorithm, "init_client", start)
    down = _tried(algorithm, "broadcast", server, 0)
    probe = ShapeProbe(start)
    found = _tried(algorithm, "local_update", client, down, probe)
    name = type(algorithm).__name__
    if not (isinstance(found, tuple) and [type(each) for each in found] == [State, Upload]):
        raise EquipoiseError(f"{name}.local_update must return the client's next State and an Upload, as a pair")
    after, upload = found
    if after.shapes() != client.shapes():
        raise EquipoiseError(f"{name}.local_update changes the fields or shapes of the client's state")
    up = upload.wire if weighted else upload.message
    return MessageSchema(
        server.shapes(),
        client.shapes(),
        down.shapes(),
        up.shapes(),
        upload.message.numel,
        client.numel,
        weighs_samples=weighted and upload.weight is probe.size,
        weighs_iterations=weighted
        and any(upload.weight is given for given in (probe.iterations, probe.iterations_performed)),
        diagnostics=_diagnostics(algorithm, after, down) if weighted else (),
        references=_references(upload, down),
    )


def _diagnostics(algorithm: Algorithm, client: State, down: State) -> tuple[str, ...]:
    """Return the names of the numbers that a client reports."""
    if not isinstance(algorithm, ReportsDiagnostics):
        return ()
    found = _tried(algorithm, "diagnostics", client, down)
    if not isinstance(found, State) or any(t.shape != (1,) for t in found.values()):
        raise EquipoiseError(f"{type(algorithm).__name__}.diagnostics must return a State of numbers of shape (1,)")
    return tuple(found)


def _references(upload: Upload, down: State) -> dict[str, tuple[str, ...]]:
    """Return which fields of the broadcast are the references of an upload's fields; a reference of zeros is none."""
    found: dict[str, tuple[str, ...]] = {}
    for name in upload.message:
        before = None if upload.reference is None else upload.reference.get(name)
        if before is None or not bool(before.any()):
            continue
        same = tuple(k for k, t in down.items() if t is before)
        found[name] = same or tuple(k for k, t in down.items() if t.shape == before.shape and torch.equal(t, before))
    return {name: fields for name, fields in found.items() if fields}


def _tried(algorithm: Algorithm, hook: str, *given: Any) -> Any:
    """Call a hook; whatever it raises becomes one sentence that names the hook and the line."""
    try:
        return getattr(algorithm, hook)(*given)
    except EquipoiseError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise EquipoiseError(f"{type(algorithm).__name__}.{hook} fails: {text} ({place})") from error


class ShapeProbe:
    """Local data that train nothing: with them the hooks of an algorithm show the shapes of what they return."""

    def __init__(self, start: Start):
        self.space, self.seed, self.dtype = start.space, start.seed, start.w0.dtype
        self.outputs, self.start, self.round, self.lr = start.outputs, start, 1, 1.0
        self.size = start.w0.new_ones(1)
        # One tensor each: the schema recognises what a weight is by its identity.
        self.iterations, self.iterations_performed, self.local_steps = (start.w0.new_ones(1) for _ in range(3))

    @property
    def class_counts(self) -> Tensor:
        return self.start.w0.new_ones(self.outputs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"data has no {name!r}{nearest(name, [k for k in dir(LocalData) if k[0] != '_'])}")

    def point(self, name: str) -> RepresentationPoint:
        return self.start.point(name)

    def descend(self, start: Tensor, **_: object) -> Tensor:
        return start.clone()

    def rate(self, lr: Rate | None) -> Rate:
        return self.lr if lr is None else lr

    def walk(self, start: State, step: Callable[[State, BatchGradient], State], **_: object) -> State:
        found = step(start, lambda v, which=0: torch.zeros_like(v))
        return State({name: t.clone() for name, t in found.items()})

    def reinitialised(self, v: Tensor) -> Tensor:
        return v.clone()

    def loss(self, v: Tensor, **_: object) -> Tensor:
        return torch.ones_like(self.size)

    def gradient_squares(self, v: Tensor) -> Tensor:
        return torch.ones_like(self.size)

    def full_gradient(self, v: Tensor, **_: object) -> Tensor:
        return torch.zeros_like(v)

    def term_gradient(self, term: LossTerm, v: Tensor, **_: object) -> Tensor:
        return torch.zeros_like(v)

    def class_sums(self, v: Tensor, of: Callable[[Tensor], Tensor], *, at: str = HEAD) -> Tensor:
        columns = of(self.start.w0.new_ones(1, self.point(at).width)).shape[1]
        return self.start.w0.new_zeros(self.outputs, columns)

    def moments(self, v: Tensor, *, groups: int = 1, **_: object) -> Moments:
        inputs, outputs, _bias = linear_head(self.space)
        new = widened(self.start.w0)
        x = torch.eye(inputs, dtype=new.dtype, device=new.device).expand(groups, -1, -1)
        return Moments(x, new.new_zeros(groups, inputs, outputs), new.new_ones(groups, 1, 1))

    def head_problem(self, v: Tensor, *, groups: int = 1, **_: object) -> HeadProblem:
        inputs, outputs = linear_head(self.space)[:2]
        new, shape = self.start.w0, torch.Size([outputs])
        one = HeadSamples(new.new_ones(1, inputs), new.new_zeros(1, outputs), 1, [slice(0, 1)] * groups, shape, outputs)
        return HeadProblem((one,), False, LOSSES["squared"])

    def body_gradient(self, v: Tensor, objective: Callable[..., Tensor], **_: object) -> Tensor:
        return torch.zeros_like(v)
