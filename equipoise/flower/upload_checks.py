"""A client's update as it came in: used only if it is whole, finite and has a weight that can be."""

from equipoise.algorithms.base import Announcement
from equipoise.flower.codec import Refused, group
from equipoise.flower.transport import Answered
from equipoise.state import State, Upload


def update_of(answered: Answered, round: int, announced: Announcement) -> Upload:
    """The upload that the algorithm's `local` made over there, or Refused."""
    wire = group(answered.tensors, "up")
    if answered.answer.trained != round or wire.shapes() != announced.up:
        raise Refused("shape", f"round {round}: the update is not whole")
    if not wire.finite():
        raise Refused("not-finite", f"round {round}: NaN or infinite numbers in the update")
    weight = wire.get("weight")
    if weight is not None and not bool((weight > 0).all()):
        raise Refused("weight", f"round {round}: a weight that is not above zero")
    return Upload(State({k: t for k, t in wire.items() if k != "weight"}), weight=weight)
