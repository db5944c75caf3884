"""Training of a client's body by the gradient of the outer loss, through all cells."""

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.learn2pfed.cells import Cells
from equipoise.algorithms.learn2pfed.head import Sides
from equipoise.optimizers import LocalOptimizer
from equipoise.state import State


def outer_loss(cells: Cells, raw: Tensor, tape: Tensor, u_bars: Tensor, sides: Sides) -> Tensor:
    """Return a function of a client's features whose gradient is that of the sum of all clients' outer losses.

    The client's own loss depends on its features directly; the others' depend on them through what it sent, u. Their
    derivatives with respect to u are known from the backward pass, so <u, u_bar> of each cell stands for them.

    Args:
        cells: the cells.
        raw: the learnables with which they ran.
        tape: the incoming alpha, v, z and w of each cell.
        u_bars: adjoints of what each cell sent.
        sides: what the heads are fitted to, and what judges them, as functions of the features.
    """
    alpha, v, z, _ = tape[..., 0, :, :, :, :].unbind(-4)
    total = torch.zeros_like(raw[..., 0])
    for cell in range(tape.shape[-5]):
        w = tape[..., cell, 3, :, :, :]
        alpha, v, z = cells.forward(cell, sides.fit, raw, alpha, v, z, w)
        total = total + ((v - z - alpha) * u_bars[..., cell, :, :, :]).flatten(-3).sum(-1)
    assert sides.judge is not None
    return total + sides.judge.value(v)


def remembered(algorithm: Algorithm) -> tuple[str, ...]:
    """Return what the update rule of the body remembers from step to step."""
    if algorithm.optimizer == "sgd":
        return ("first",) if algorithm.momentum else ()
    return ("first", "second", "count")


def body_memory(algorithm: Algorithm, body: Tensor) -> State:
    """Return the initial memory of the body's update rule."""
    new = {name: body.new_zeros(1) if name == "count" else torch.zeros_like(body) for name in remembered(algorithm)}
    return State({f"body_{name}": t for name, t in new.items()})


def step_body(algorithm: Algorithm, client: State, gradient: Tensor, lr: float) -> State:
    """Return a client's network after a step of its body, and the new memory of the update rule.

    There is one step per epoch, so the rule remembers from epoch to epoch.

    Args:
        algorithm: the algorithm, whose update rule is used.
        client: the client's state.
        gradient: the gradient of the body.
        lr: the learning rate.
    """
    a, network = algorithm, client.network.clone()
    rule = LocalOptimizer(a.optimizer, lr, a.momentum, a.clip, nesterov=a.nesterov, weight_decay=a.weight_decay)
    for name in remembered(a):
        setattr(rule, name, client[f"body_{name}"].clone())
    rule(network[..., : gradient.shape[-1]], gradient)
    return State(coming=network, **{f"body_{name}": getattr(rule, name) for name in remembered(a)})
