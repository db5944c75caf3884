"""A check for methods that read gradients off the difference of two models."""

from equipoise.algorithms.base import Algorithm
from equipoise.errors import EquipoiseError


def check_plain_sgd(algorithm: Algorithm, why: str, *, momentum: bool = False, clip: bool = False) -> None:
    """Raise an error if local steps are not those of SGD.

    Args:
        algorithm: the algorithm.
        why: what the algorithm does that needs SGD, for the error message.
        momentum: whether momentum is allowed.
        clip: whether clipping is allowed.
    """
    name = type(algorithm).__name__
    if algorithm.optimizer != "sgd":
        raise EquipoiseError(
            f"algorithm.optimizer = {algorithm.optimizer!r} is not possible with {name}, which {why}; use 'sgd'"
        )
    for setting, allowed in (("momentum", momentum), ("clip", clip)):
        if not allowed and (value := getattr(algorithm, setting)):
            raise EquipoiseError(
                f"algorithm.{setting} = {value} is not possible with {name}, which {why}; leave it out"
            )
