"""Losses, by name or of the user's own, and checks that they fit a model's outputs and the targets."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.quantiles import Pinball

Each = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> one number per sample


@dataclass(frozen=True)
class Loss:
    """A loss as its mean over a batch and, if available, as one value per sample."""

    mean: Callable[[Tensor, Tensor], Tensor]
    each: Each | None
    least: float = -inf
    "smallest possible value; one of the user's own may be negative"
    curvature: Callable[[int], float] = lambda outputs: 1.0
    """bound of the largest eigenvalue of the second derivatives of a sample's loss by its outputs, for so many of them;
    of the user's own nothing is known, so it is taken to be 1"""
    pinball: Pinball | None = None
    "the quantiles that the outputs are, if it is the pinball loss"

    @property
    def outputs_per_number(self) -> int:
        """Return the number of outputs that a model has for each number of a target."""
        return 1 if self.pinball is None else len(self.pinball.quantiles)

    def of_each(self, output: Tensor, target: Tensor) -> Tensor:
        """Return one value per sample, if need be as the mean over that sample alone."""
        if self.each is not None:
            return self.each(output, target)
        return torch.stack([self.mean(output[i : i + 1], target[i : i + 1]) for i in range(len(target))])


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each sample."""
    return (output.reshape(len(target), -1) - target.reshape(len(target), -1)).square().mean(-1)


def compared_outputs(output: Tensor, target: Tensor) -> Tensor:
    """Return the outputs to compare with the targets: at the last position if there is one target for all positions."""
    return output[:, -1] if output.ndim == 3 and target.ndim == 1 else output


def _mean_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(compared_outputs(output, target).flatten(0, -2), target.flatten())


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return one value per sample, in fewer traced operations than F.cross_entropy."""
    output = compared_outputs(output, target)
    if output.ndim == 2 and output.stride(0) == 1:  # one row per class in memory: fast along rows, slow across them
        return -output.t().log_softmax(0).gather(0, target.unsqueeze(0)).squeeze(0)
    logs = output.log_softmax(-1)
    each = -logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return each if each.ndim == 1 else each.mean(-1)


def _pinball_loss(pinball: Pinball) -> Loss:
    return Loss(lambda o, t: pinball(o, t).mean(), pinball, 0.0, pinball=pinball)


LOSSES = {
    # The matrix is diag(s) - ss' with s = softmax(output), whose eigenvalues are at most 1/2.
    "cross-entropy": Loss(_mean_cross_entropy, _cross_entropy, 0.0, lambda outputs: 0.5),
    "squared": Loss(lambda o, t: squared_error(o, t).mean(), squared_error, 0.0, lambda outputs: 2 / outputs),
    "pinball": _pinball_loss(Pinball()),
}


def fitting_loss(loss: str | Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Loss:
    """Return a loss, or raise an error if it does not fit the model and the data.

    Args:
        loss: the name of a loss, a `Pinball`, or a function.
        output: outputs of the model for some samples.
        target: targets of these samples.
    """
    if isinstance(loss, type):
        raise EquipoiseError(f"loss is the class {loss.__name__}; create it: {loss.__name__}()")
    if not isinstance(loss, str) and not callable(loss):
        raise EquipoiseError(f"loss = {loss!r} is not allowed; available: {', '.join(LOSSES)}, or a function")
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise EquipoiseError(f"unknown loss {loss!r}; available: {', '.join(LOSSES)}, or a function")
        found = LOSSES[loss]
        if loss == "squared":
            check_squared(output, target)
        elif found.pinball is not None:
            _check_pinball(found.pinball, output, target)
        else:
            _check_classes(output, target)
        return found
    if isinstance(loss, Pinball):
        _check_pinball(loss, output, target)
        return _pinball_loss(loss)
    try:
        value = loss(output, target)
    except Exception as error:
        raise EquipoiseError(
            f"the loss fails on outputs {tuple(output.shape)} and targets {tuple(target.shape)}: {error}"
        ) from error
    if not isinstance(value, Tensor):
        raise EquipoiseError(f"the loss returns {type(value).__name__}; it must return a tensor")
    if value.ndim == 0:
        return Loss(loss, None)
    if value.shape == (len(target),):
        return Loss(lambda o, t: loss(o, t).mean(), loss)
    raise EquipoiseError(
        f"the loss returns shape {tuple(value.shape)}; it must be a mean, (), or one value per sample, {(len(target),)}"
    )


def _check_classes(output: Tensor, target: Tensor) -> None:
    one_a_sample = target.ndim == 1 and output.ndim in (2, 3)
    one_a_position = target.ndim == 2 and target.shape == output.shape[:-1]
    if target.is_floating_point() and target.ndim == 1:
        raise EquipoiseError(
            "the loss 'cross-entropy' needs classes as whole numbers, and the targets are of type "
            f"{str(target.dtype).removeprefix('torch.')}; convert them (y.astype('int64')), or use loss='squared' for "
            "numbers"
        )
    if target.is_floating_point() or not (one_a_sample or one_a_position):
        raise EquipoiseError(
            "the loss 'cross-entropy' needs one whole number per sample as its target, or one per position if the "
            f"model gives one output per position; here outputs have shape {tuple(output.shape)} and targets "
            f"{tuple(target.shape)}; for other numbers use 'squared'"
        )


def check_squared(output: Tensor, target: Tensor) -> None:
    """Raise an error if outputs and targets have different numbers of values."""
    if output.numel() != target.numel():
        raise EquipoiseError(
            f"the model gives {output[0].numel()} numbers per sample and the targets have {target[0].numel()}; "
            "squared errors need equally many"
        )


def _check_pinball(pinball: Pinball, output: Tensor, target: Tensor) -> None:
    numbers, quantiles = target[0].numel(), len(pinball.quantiles)
    if not target.is_floating_point():
        raise EquipoiseError("the loss 'pinball' forecasts quantiles of numbers, and the targets are whole numbers")
    if output[0].numel() != numbers * quantiles:
        raise EquipoiseError(
            f"the model gives {output[0].numel()} numbers per sample; the loss 'pinball' needs {numbers * quantiles}: "
            f"{quantiles} quantiles of each of the {numbers} numbers of a target"
        )
