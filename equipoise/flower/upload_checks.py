"""Checks of a client's update: it is used only if it is complete and finite, with a weight above zero."""

from equipoise.algorithms.schema import MessageSchema
from equipoise.flower.codec import RejectedMessage, group
from equipoise.flower.transport import Reply
from equipoise.state import State, Upload


def checked_upload(reply: Reply, round: int, schema: MessageSchema) -> Upload:
    """Return the upload that the client's `Algorithm.local_update` made, or raise RejectedMessage.

    Args:
        reply: the client's reply.
        round: the round that it should have trained for.
        schema: what the algorithm's messages contain.
    """
    tensors = group(reply.tensors, "up")
    if reply.answer.trained != round or tensors.shapes() != schema.up:
        raise RejectedMessage("shape", f"round {round}: the update is incomplete")
    if not tensors.finite():
        raise RejectedMessage("not-finite", f"round {round}: the update has NaN or infinite numbers")
    weight = tensors.get("weight")
    if weight is not None and not bool((weight > 0).all()):
        raise RejectedMessage("weight", f"round {round}: the weight is not above zero")
    return Upload(State({k: t for k, t in tensors.items() if k != "weight"}), weight=weight)
