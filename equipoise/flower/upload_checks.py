"""A client's update as it came in: used only if it is whole, finite and has a weight that can be."""

from equipoise.algorithms.schema import MessageSchema
from equipoise.flower.codec import RejectedMessage, group
from equipoise.flower.transport import Reply
from equipoise.state import State, Upload


def checked_upload(reply: Reply, round: int, schema: MessageSchema) -> Upload:
    """The upload that the algorithm's `local` made over there, or Refused."""
    wire = group(reply.tensors, "up")
    if reply.answer.trained != round or wire.shapes() != schema.up:
        raise RejectedMessage("shape", f"round {round}: the update is not whole")
    if not wire.finite():
        raise RejectedMessage("not-finite", f"round {round}: NaN or infinite numbers in the update")
    weight = wire.get("weight")
    if weight is not None and not bool((weight > 0).all()):
        raise RejectedMessage("weight", f"round {round}: a weight that is not above zero")
    return Upload(State({k: t for k, t in wire.items() if k != "weight"}), weight=weight)
