"""One unrolled iteration of ADMM (a cell), forward and backward, with the symbols of Eqs. 9 to 11."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equipoise.algorithms.learn2pfed.fits import ClosedFit, Fit, HeadFit
from equipoise.algorithms.learn2pfed.learnables import SCALARS, Layout, set_of


class Values(NamedTuple):
    """Λ and the scalars of a cell."""

    lam: Tensor
    rho: Tensor
    eta: Tensor
    theta: Tensor


class Adjoints(NamedTuple):
    """The derivatives of a loss with respect to the inputs of a cell; for scalars, with respect to their logarithms."""

    inputs: list[Tensor]
    "those of the incoming alpha, v and z"
    w: Tensor
    lam: Tensor
    scalars: Tensor
    "those of rho, eta and theta, of shape (..., 3)"


class CellGradients(NamedTuple):
    """The result of a cell's backward pass."""

    u: Tensor
    "what the cell sent in the forward pass"
    inputs: list[Tensor]
    "adjoints of the incoming alpha, v and z"
    w: Tensor
    "adjoint of w"
    raw: Tensor
    "adjoint of the learnables"


@dataclass(frozen=True)
class Cells:
    """The cells of a network, which differ only in the learnables that they use."""

    layout: Layout
    solve: Literal["closed", "gradient"]
    solve_rate: float
    solve_steps: int
    positive: Literal["relu", "log"]
    follow: tuple[str, ...]

    def values(self, raw: Tensor, cell: int) -> Values:
        """Return Λ and the scalars of a cell."""
        k = set_of(cell, self.layout.sets)
        lam = self.layout.lam(raw, k)
        scalars = self.followed(*self.layout.scalars(raw, k))
        return Values(lam.exp() if self.positive == "log" else lam.relu(), *scalars)

    def followed(self, rho: Tensor, eta: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the scalars that follow rho by rho."""
        return rho, rho if "eta" in self.follow else eta, rho if "theta" in self.follow else theta

    def forward(
        self, cell: int, fit: HeadFit, raw: Tensor, alpha: Tensor, v: Tensor, z: Tensor, w: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do one iteration of ADMM, and return the next alpha, v and z.

        Args:
            cell: the number of the cell.
            fit: what the client's heads are fitted to.
            raw: the client's learnables.
            alpha: the dual.
            v: the client's head.
            z: the client's deviation from w.
            w: the common head.
        """
        lam, rho, eta, theta = self.values(raw, cell)
        alpha = alpha + theta * (z - v + w)  # Eq. 9
        q = w + z + alpha
        if self.solve == "closed":
            assert isinstance(fit, ClosedFit)
            v = fit.solved(rho, q)  # Eq. 10
        else:
            v = fit.stepped(rho, q, v, self.solve_rate, self.solve_steps)  # Eq. 14
        z = eta / (lam + eta) * (v - w - alpha)  # Eq. 11
        return alpha, v, z

    def backward(
        self, cell: int, fit: HeadFit, raw: Tensor, tape: Tensor, x_bar: Tensor, u_bar: Tensor
    ) -> CellGradients:
        """Compute the adjoints of a cell's inputs from those of its outputs.

        Args:
            cell: the number of the cell.
            fit: what the client's heads are fitted to.
            raw: the client's learnables.
            tape: the incoming alpha, v, z and w.
            x_bar: adjoints of the outgoing alpha, v and z.
            u_bar: adjoint of what the cell sent.
        """
        if self.solve == "closed" and isinstance(fit, Fit):
            return self._by_hand(cell, fit, raw, tape, x_bar, u_bar)
        return self._by_autograd(cell, fit, raw, tape, x_bar, u_bar)

    def _by_autograd(
        self, cell: int, fit: HeadFit, raw: Tensor, tape: Tensor, x_bar: Tensor, u_bar: Tensor
    ) -> CellGradients:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in tape.unbind(-4)]
            learnables = raw.detach().requires_grad_()
            alpha, v, z = self.forward(cell, fit, learnables, *inputs)
            u = v - z - alpha
            outputs, adjoints = [alpha, v, z, u], [*x_bar.unbind(-4), u_bar]
            *found, w_bar, more = torch.autograd.grad(outputs, [*inputs, learnables], adjoints)
        return CellGradients(u.detach(), found, w_bar, more)

    def _by_hand(self, cell: int, fit: Fit, raw: Tensor, tape: Tensor, x_bar: Tensor, u_bar: Tensor) -> CellGradients:
        """Compute the adjoints for closed solves, faster than by autograd."""
        values, k = self.values(raw, cell), set_of(cell, self.layout.sets)
        u, bars = closed_cell_adjoints(fit, values, tape.unbind(-4), x_bar.unbind(-4), u_bar)
        scalars = bars.scalars.clone()
        for name in self.follow:
            at = SCALARS.index(name)
            scalars[..., 0] += scalars[..., at]
            scalars[..., at] = 0
        lam = bars.lam * (values.lam if self.positive == "log" else self.layout.lam(raw, k) > 0)
        return CellGradients(u, bars.inputs, bars.w, self.layout.gradient(k, lam, scalars))


def closed_cell_adjoints(
    fit: Fit, values: Values, inputs: Sequence[Tensor], x_bar: Sequence[Tensor], u_bar: Tensor
) -> tuple[Tensor, Adjoints]:
    """Return what a cell with a closed solve sends, u, and its adjoints.

    They are written out by hand, because the matrices are small and autograd's overhead would dominate.

    Args:
        fit: the client's data.
        values: the learnables.
        inputs: the incoming alpha, v, z and w.
        x_bar: adjoints of the outgoing alpha, v and z.
        u_bar: adjoint of u.
    """
    (lam, rho, eta, theta), (alpha, v, z, w) = values, inputs
    gap = z - v + w
    alpha = alpha + theta * gap
    Uq = fit.U.mT @ (w + z + alpha)
    Uv = (rho * Uq + fit.UXY) / (fit.d + rho)
    v = fit.U @ Uv
    kappa, r = eta / (lam + eta), v - w - alpha  # z = kappa r
    u = v - kappa * r - alpha

    alpha_bar, v_bar, z_bar = x_bar
    z_bar = z_bar - u_bar
    r_bar, kappa_bar = kappa * z_bar, z_bar * r / (lam + eta)
    g = (fit.U.mT @ (v_bar + u_bar + r_bar)) / (fit.d + rho)
    q_bar = fit.U @ (rho * g)
    alpha_bar = alpha_bar - u_bar - r_bar + q_bar
    gap_bar = theta * alpha_bar
    by_scalar = [g * (Uq - Uv) * rho, kappa_bar * (1 - kappa) * eta, alpha_bar * gap * theta]
    scalars = torch.stack([t.flatten(-3).sum(-1) for t in by_scalar], dim=-1)
    lam_bar = -(kappa_bar * kappa).sum(-3, keepdim=True)
    return u, Adjoints([alpha_bar, -gap_bar, q_bar + gap_bar], q_bar - r_bar + gap_bar, lam_bar, scalars)
