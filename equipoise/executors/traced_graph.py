"""A traced list of tensor operations, and what makes it short.

Each operation costs microseconds per step. It also releases the interpreter's lock and takes it again, for which a
thread often has to wait: with half the operations, two threads wait a quarter as often.
"""

import operator
import threading
from typing import Any

import torch
from torch import Tensor

TRACED_RATE = 0.739085133215160641655
"""Stands for the learning rate in a trace; no model multiplies by it."""

_aten = torch.ops.aten
_FUNCTIONS = {
    _aten.add.Tensor: torch.add,
    _aten.bmm.default: torch.bmm,
    _aten.mul.Tensor: torch.mul,
    _aten.neg.default: torch.neg,
    _aten.relu.default: torch.relu,
    _aten.sum.dim_IntList: torch.sum,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.scatter_add.default: torch.scatter_add,
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
}
_METHODS = {_aten.add_.Tensor: "add_", _aten.view.default: "view", _aten.new_zeros.default: "new_zeros"}
_RESHAPES = (_aten.view.default, _aten.expand.default, _aten._unsafe_view.default)
_VIEWS = (
    _aten.view.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.slice.Tensor,
    _aten.squeeze.dims,
    _aten.transpose.int,
    _aten.unsqueeze.default,
)


class _LastViews(threading.local):
    """The views that a thread made last: of which graph, of which two inputs, and the views themselves."""

    graph: object = None
    inputs: tuple[Tensor | None, Tensor | None] = (None, None)
    views: tuple[Tensor, ...] = ()


_last = _LastViews()


class TracedGraph:
    """A traced list of operations to call.

    Its first two inputs are usually the same tensors in many calls, with other values: the vectors in training, and the
    memory of a batch. Views of them are made once, and kept while the same thread calls it with the same tensors.
    """

    def __init__(self, module: torch.fx.GraphModule):
        """Split off the views of the first two inputs; the module itself is changed."""
        self.module = module
        self.prelude = _split_views(module)
        _use_functions_of_torch(module)

    def __call__(self, v: Tensor, x: Tensor, *rest: Any) -> Tensor:
        """Do what the traced function does with these arguments."""
        last = _last
        if last.graph is not self or last.inputs[0] is not v or last.inputs[1] is not x:
            last.graph, last.inputs, last.views = self, (v, x), self.prelude.forward(v, x)
        # `forward`, because a call of the module itself costs microseconds
        found: Tensor = self.module.forward(v, x, *last.views, *rest)
        return found


def _split_views(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Make views of the first two inputs further inputs, after these two; return the module that makes the views."""
    graph, prelude = module.graph, torch.fx.Graph()
    first, second = [node for node in graph.nodes if node.op == "placeholder"][:2]
    copies = {node: prelude.placeholder(name) for node, name in ((first, "v"), (second, "x"))}
    for node in graph.nodes:
        if node.target in _VIEWS and node.args[0] in copies:
            copies[node] = prelude.node_copy(node, copies.__getitem__)
    views = [node for node in copies if node.op != "placeholder" and any(user not in copies for user in node.users)]
    prelude.output(tuple(copies[node] for node in views))
    last = second
    for node in views:
        with graph.inserting_after(last):
            last = graph.placeholder(f"{node.name}_input")
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in copies)
    for node in reversed([node for node in copies if node.op != "placeholder"]):
        graph.erase_node(node)
    module.recompile()
    return torch.fx.GraphModule(module, prelude)


def make_rate_an_input(module: torch.fx.GraphModule) -> None:
    """Replace the rate that a step was traced with by a last input of the graph."""
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    with module.graph.inserting_after(last):
        lr = module.graph.placeholder("lr")
    with module.graph.inserting_after(lr):
        negative = module.graph.call_function(operator.neg, (lr,))
    for node in module.graph.nodes:
        if node.kwargs.get("alpha") == -TRACED_RATE:
            node.kwargs = {**node.kwargs, "alpha": negative}
    module.recompile()


def simplify(module: torch.fx.GraphModule) -> None:
    """Remove unused results (the loss itself) and views that change nothing or exist already."""
    known: dict[tuple[object, ...], torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.target not in (*_VIEWS, *_RESHAPES):
            continue
        before, *how = node.args
        twice = node.target == before.target == _aten.transpose.int and list(before.args[1:]) == how
        if node.target in _RESHAPES and node.meta["val"].shape == before.meta["val"].shape:
            node.replace_all_uses_with(before)
        elif twice:
            node.replace_all_uses_with(before.args[0])
        elif _drops_summed_axes(node, before):
            before.args, before.meta["val"] = before.args[:2], node.meta["val"]
            node.replace_all_uses_with(before)
        else:
            same = known.setdefault((node.target, before, repr(how)), node)
            if same is not node:
                node.replace_all_uses_with(same)
    module.graph.eliminate_dead_code()
    module.recompile()


def _drops_summed_axes(node: torch.fx.Node, before: torch.fx.Node) -> bool:
    """Tell whether a view does nothing but drop the axes of length one that a sum kept."""
    if before.target != _aten.sum.dim_IntList or len(before.args) != 3 or len(before.users) > 1:
        return False
    summed, axes, kept = before.args
    assert isinstance(summed, torch.fx.Node)
    shape = summed.meta["val"].shape
    rest = [length for axis, length in enumerate(shape) if axis not in axes]  # type: ignore[operator]
    return bool(kept) and list(node.meta["val"].shape) == rest


def _use_functions_of_torch(module: torch.fx.GraphModule) -> None:
    """Call the usual operations by their functions in torch, which take half the time of torch.ops to be called."""
    for node in module.graph.nodes:
        if node.target in _FUNCTIONS:
            node.target = _FUNCTIONS[node.target]
        elif node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
    module.recompile()
