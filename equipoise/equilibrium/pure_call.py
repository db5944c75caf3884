"""f as a function of all tensors that it uses, so that it can be computed again with other ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from equipoise.equilibrium.states import StateLayout
from equipoise.errors import EquipoiseError


class PureCall:
    """f(z, *inputs) as a function of z and of `tensors`: the inputs that are tensors, parameters and buffers of f."""

    def __init__(self, f: Callable[..., Any], inputs: Sequence[Any], layout: StateLayout | None):
        """Take f apart.

        Args:
            f: a module, or a function that uses no tensors that learn except its arguments.
            inputs: its arguments after z.
            layout: the layout of its state, if that has several tensors and z is rows of numbers.
        """
        self.f, self.layout = f, layout
        self.places = [k for k, x in enumerate(inputs) if isinstance(x, Tensor)]
        self.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
        named = {**dict(f.named_parameters()), **dict(f.named_buffers())} if isinstance(f, nn.Module) else {}
        self.names = list(named)
        self.tensors: list[Tensor] = [*(inputs[k] for k in self.places), *named.values()]

    def __call__(self, z: Tensor, *tensors: Tensor) -> Tensor:
        given = list(self.inputs)
        for k, x in zip(self.places, tensors, strict=False):
            given[k] = x
        parameters = dict(zip(self.names, tensors[len(self.places) :], strict=True))
        state = z if self.layout is None else self.layout.state(z)
        value = functional_call(self.f, parameters, (state, *given)) if parameters else self.f(state, *given)  # type: ignore[arg-type]
        return value if self.layout is None else self.layout.rows(value)


def refusing_hidden_tensors(call: PureCall, where: str) -> Callable[..., Tensor]:
    """Return the call, which the first time refuses an f that uses tensors that it does not know.

    Tensors that learn but are neither inputs nor parameters of f would be taken as constants, and derivatives would be
    wrong.

    Args:
        call: f as a function of all its tensors.
        where: what needs to know all tensors, in words.
    """
    checked = False

    def function(z: Tensor, *tensors: Tensor) -> Tensor:
        nonlocal checked
        if checked:
            return call(z, *tensors)
        checked = True
        value, unknown = _watched(call, z, tensors)
        # What an operation made out of sight (in a transform of its own, say) is another tensor the second time.
        if unknown and unknown.keys() & _watched(call, z, tensors)[1].keys():
            raise EquipoiseError(
                f"{where}, f may not use tensors that learn except its inputs; pass them as inputs (each by itself and "
                "not in a list), or make f a module that has them as parameters"
            )
        return value

    return function


def _watched(call: PureCall, z: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return f(z), and the tensors that learn that it used without knowing them."""
    # Views, so that normalised weights are not those computed before, which would be unknown.
    views = [t.view_as(t) for t in tensors]
    with _KnownTensors([z, *views]) as mode:
        return call(z, *views), mode.unknown


class _KnownTensors(TorchFunctionMode):
    """Finds the tensors that learn that operations get and that are neither given nor results of other operations."""

    def __init__(self, given: Sequence[Tensor]):
        super().__init__()
        self.known = {id(t): t for t in given}  # the tensors too, so that their identities stay theirs
        self.unknown: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.unknown |= {k: t for k, t in _learning((args, kwargs)).items() if k not in self.known}
        value = func(*args, **(kwargs or {}))
        self.known |= _learning(value)
        return value


def _learning(values: Any) -> dict[int, Tensor]:
    found = (t for t in tree_leaves(values) if isinstance(t, Tensor))
    return {id(t): t for t in found if of_transform(t) or t.requires_grad}


class StackedCall:
    """A call for a stack of problems, whose rows are put one after another."""

    def __init__(self, call: Callable[..., Tensor], size: int, in_dims: Sequence[int | None]):
        """Stack a call.

        Args:
            call: the function of z and tensors.
            size: the number of problems.
            in_dims: the axis along which each tensor is stacked, or None if all problems share it.
        """
        self.size = size
        self.stacked = vmap(call, in_dims=(0, *in_dims))

    def __call__(self, z: Tensor, *tensors: Tensor) -> Tensor:
        value = self.stacked(z.reshape(self.size, -1, *z.shape[1:]), *tensors)
        result: Tensor = value.flatten(0, 1)
        return result


def stack_rows(rows: Tensor, size: int, in_dim: int | None) -> Tensor:
    """Return the rows of a stack of problems, one problem after another."""
    rows = rows.expand(size, *rows.shape) if in_dim is None else rows.movedim(in_dim, 0)
    return rows.flatten(0, 1)


def inside_transform() -> bool:
    """Tell whether a transform of torch.func (grad, vjp, jvp, vmap, ...) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_nested_jvp() -> bool:
    """Tell whether forward-mode transforms of torch.func (jvp, jacfwd) are under way within each other."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack) > 1


def of_transform(value: object) -> bool:
    """Tell whether a tensor belongs to a transform of torch.func."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
