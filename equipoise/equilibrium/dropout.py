"""Variational dropout: one mask per sample for a whole solve, so that f stays one function with one fixed point.

Masks are drawn when f is first computed in a forward pass, for all samples. Later calls have fewer samples, those that
have not converged, and each sample keeps its mask (Gal and Ghahramani, 2016; for equilibria Bai et al., 2019).
"""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.errors import EquipoiseError


class VariationalDropout(nn.Module):
    """Sets each entry to zero with probability p in training, the same entries in all iterations of a solve.

    Within f of an equilibrium layer, masks are drawn once per forward pass of the layer. Elsewhere it is nn.Dropout.
    """

    draws: ClassVar[bool] = True
    generator: torch.Generator | None = None
    "source of random numbers; by default torch's global one"

    def __init__(self, p: float = 0.5):
        """Create the layer.

        Args:
            p: probability that an entry is set to zero; the others are divided by 1 - p.
        """
        super().__init__()
        if not isinstance(p, (int, float)) or not 0 <= p < 1:
            raise EquipoiseError(f"p = {p!r} is not allowed; the probability of a dropout must be >= 0 and < 1")
        self.p = float(p)
        self.mask: Tensor | None = None
        "the masks of all samples of the current forward pass of an equilibrium layer"
        self.rows: Tensor | None = None
        "which of these samples the next call is for; None: all of them"
        self.samples: int | None = None
        "number of samples in the next call, if a solver makes it"
        self.passes = 0
        "number of forward passes of equilibria that are under way, one inside the other"
        self.within = False
        "whether it has been part of such a pass"

    def extra_repr(self) -> str:
        return f"p={self.p:g}"

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with some entries set to zero, if the layer is training."""
        if not self.training or self.p == 0:
            return x
        if self.mask is None:
            self._refuse_new_mask_in_backward()
        if not self.passes:
            return x * self._drawn(x)
        if self.samples not in (None, len(x)):
            raise EquipoiseError(
                f"a variational dropout got an input of shape {tuple(x.shape)} for {self.samples} samples; within an "
                "equilibrium its inputs need one row per sample"
            )
        if self.mask is None:
            self.mask = self._drawn(x)
        mask = self.mask if self.rows is None else self.mask[self.rows]
        if mask.shape != self.shape(x):
            raise EquipoiseError(
                f"a variational dropout has a mask of shape {tuple(mask.shape)} for an input of shape "
                f"{tuple(x.shape)}; within an equilibrium its inputs need the same shape in every call"
            )
        return x * mask

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the mask of an input."""
        return tuple(x.shape)

    def _refuse_new_mask_in_backward(self) -> None:
        """Refuse to be computed again in a backward pass, if the mask would be another than in the forward pass.

        `checkpoint` restores torch's global source of random numbers, so that only a mask that is drawn from it by the
        same call is the same again.
        """
        if torch._C._current_graph_task_id() == -1:
            return
        if self.within and not self.passes:
            raise EquipoiseError(
                "a variational dropout in f cannot be computed again in a backward pass; use torch.utils.checkpoint "
                "around parts of f without dropout, or around the whole equilibrium layer"
            )
        if self.generator is not None:
            raise EquipoiseError(
                "a variational dropout with its own source of random numbers, as in a run, cannot be computed again in "
                "a backward pass; use torch.utils.checkpoint around parts of the model without dropout"
            )

    @torch.no_grad()
    def _drawn(self, x: Tensor) -> Tensor:
        device = x.device if self.generator is None else self.generator.device
        mask = torch.empty(self.shape(x), dtype=x.dtype, device=device)
        return mask.bernoulli_(1 - self.p, generator=self.generator).div_(1 - self.p).to(x.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "VariationalDropout":
        """Copy the layer, without masks and without its source of random numbers."""
        new = copy.copy(self)
        memo[id(self)] = new
        kept = {k: v for k, v in self.__dict__.items() if k not in ("mask", "rows", "samples", "passes", "generator")}
        new.__dict__ = {k: copy.deepcopy(v, memo) for k, v in kept.items()}
        new.mask, new.rows, new.samples, new.passes = None, None, None, 0
        return new


class VariationalDropout2d(VariationalDropout):
    """Sets whole channels of images to zero with probability p, the same ones in all iterations of a solve."""

    def shape(self, x: Tensor) -> tuple[int, ...]:
        if x.ndim != 4:
            raise EquipoiseError(f"dropout of channels needs images of 4 axes; the input has shape {tuple(x.shape)}")
        return (*x.shape[:2], 1, 1)


class SolveMasks:
    """The variational dropouts in f, during a forward pass of an equilibrium layer."""

    def __init__(self, f: object):
        """Find the dropouts.

        Args:
            f: the function of the layer, in which they are if it is a module.
        """
        modules = f.modules() if isinstance(f, nn.Module) else ()
        self.layers = [layer for layer in modules if isinstance(layer, VariationalDropout)]

    def __enter__(self) -> "SolveMasks":
        """Begin a forward pass with new masks, unless it is part of the pass of an outer equilibrium."""
        for layer in self.layers:
            layer.passes, layer.within = layer.passes + 1, True
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self.layers:
            layer.passes -= 1
            if not layer.passes:
                layer.mask, layer.rows, layer.samples = None, None, None

    def refuse(self, where: str) -> None:
        """Raise an error if masks are needed where they cannot follow their samples.

        Args:
            where: what cannot have them, in words.
        """
        if any(layer.training and layer.p > 0 for layer in self.layers):
            raise EquipoiseError(f"variational dropout does not work with {where}; use another gradient, or p = 0")

    def following(self, f: Callable[..., Any], z: Tensor) -> tuple[Callable[..., Any], list[Tensor]]:
        """Return f for a solver and one more input for it, by which masks follow their samples.

        A solver computes f with those rows of every input that belong to its active samples. So the numbers of all
        samples, as an input, come back as the numbers of the active ones.

        Args:
            f: the function.
            z: the first guess, one row per sample.
        """
        if not self.layers:
            return f, []
        outer = self.layers[0].rows  # where the samples of this batch are in that of an outer equilibrium
        before = self.layers[0].samples
        everybody = torch.arange(len(z), device=z.device) if outer is None else outer

        def function(z: Any, *inputs: Any) -> Any:
            *given, rows = inputs
            for layer in self.layers:
                layer.rows, layer.samples = (outer if rows is everybody else rows), len(rows)
            try:
                return f(z, *given)
            finally:
                for layer in self.layers:
                    layer.rows, layer.samples = outer, before

        return function, [everybody]
