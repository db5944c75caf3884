"""Orders of an exchange: what each client is asked to do, and the tensors that it needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.flower.codec import named
from equipoise.flower.protocol import Order
from equipoise.flower.roster import Member
from equipoise.state import State


@dataclass(frozen=True)
class Assignment:
    """What an exchange asks of one client."""

    number: int
    "number of the order"
    exchange: int
    "round that the exchange belongs to"
    train: int
    "round to train for; 0: none"
    evaluate: int
    "round whose models are scored; 0: none"
    finish: bool
    "whether training is over, so that the client writes its model to a file"


@dataclass(frozen=True)
class OrderContext:
    """What all orders of a run have in common."""

    run: str
    clients: int
    samples: int
    w0: Tensor
    buffers: Tensor
    clients_keep_state: bool
    "whether clients need the initial model to make their state"


def build_order(
    context: OrderContext,
    member: Member,
    assignment: Assignment,
    down: State,
    global_model: Tensor | None,
    place: int | None,
    iterations: int,
) -> tuple[Order, dict[str, Tensor]]:
    """Build an order and its tensors.

    Args:
        context: facts of the run.
        member: the client.
        assignment: what it is asked to do.
        down: the algorithm's message to it.
        global_model: the global model, if it is to be scored.
        place: its place among the malicious clients, if it plays one.
        iterations: limit of equilibrium solves; 0 for none.
    """
    tensors = dict(named(down, "down"))
    name = ""
    if global_model is not None:  # most algorithms broadcast it anyway
        name = next((f"down.{k}" for k, t in down.items() if torch.equal(t, global_model)), "global")
        tensors |= {"global": global_model} if name == "global" else {}
    if not member.accepted and (context.clients_keep_state or len(context.buffers)):
        tensors["start.w0"] = context.w0
        tensors |= {"start.buffers": context.buffers} if len(context.buffers) else {}
    order = Order(
        run=context.run,
        number=assignment.number,
        exchange=assignment.exchange,
        client=member.name,
        clients=context.clients,
        samples=context.samples,
        malicious=place is not None,
        place=place or 0,
        iterations=iterations,
        accepted=member.accepted,
        within=member.within,
        train=assignment.train,
        evaluate=assignment.evaluate,
        finish=assignment.finish,
        shared=name,
    )
    return order, tensors
