"""Fixed-point correction: losses also at guesses on the way to the fixed point (Bai et al., 2022).

They pull the whole path of the solver towards good outputs, so that a solve that is cut off is still useful.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from equipoise.errors import EquipoiseError


def evenly_spaced(n: int, limit: int) -> tuple[int, ...]:
    """Return n - 1 iterations of a solve, evenly spaced between its start and its end, which is the nth state.

    Args:
        n: number of states, the last one included.
        limit: largest number of iterations of the solve.
    """
    if not isinstance(n, int) or not 1 <= n <= limit:
        raise EquipoiseError(f"n = {n!r} is not allowed; it must be a whole number from 1 to the limit, {limit}")
    return tuple(k * limit // n for k in range(1, n))


def correction_loss(states: Sequence[Tensor], loss: Callable[[Tensor], Tensor], gamma: float = 0.8) -> Tensor:
    """Return Σ_k γ^(n-k) loss(z_k) over n states, of which the last has the weight 1.

    Args:
        states: the states of a solve, from `Equilibrium.states`.
        loss: the loss of one state, with all that follows the layer, such as
            `lambda z: cross_entropy(head(z), y)`.
        gamma: the weight γ of a state, relative to the next one.
    """
    if not gamma >= 0:
        raise EquipoiseError(f"gamma = {gamma!r} is not allowed; it must be a number >= 0")
    if not states:
        raise EquipoiseError("a correction loss needs at least one state")
    total = loss(states[-1])
    for k, state in enumerate(reversed(states[:-1]), start=1):
        total = total + gamma**k * loss(state)
    return total
