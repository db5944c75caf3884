"""How well learned strengths of sharing tell shared coefficients from others, where it is known which are shared."""

from collections.abc import Collection

from torch import Tensor


def sharing_area(strengths: Tensor, shared: Collection[int]) -> float:
    """Return the area under the ROC curve: how often a shared coefficient has a larger strength than another one.

    All clients' coefficients are compared with each other, and equal strengths count as half.

    Args:
        strengths: one row per client, one column per input of a model with one output.
        shared: the inputs whose coefficients are shared; neither none nor all.
    """
    columns = range(strengths.shape[-1])
    ties = strengths[:, [k for k in columns if k in shared]].reshape(-1, 1)
    others = strengths[:, [k for k in columns if k not in shared]].reshape(1, -1)
    return float(((ties > others).double() + 0.5 * (ties == others).double()).mean())
