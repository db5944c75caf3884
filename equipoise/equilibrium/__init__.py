"""Equilibrium layers, z = f(z, x) for any module f, in the memory of one layer; usable on their own."""

from equipoise.equilibrium.auxiliary import auxiliary_layers, auxiliary_loss
from equipoise.equilibrium.contraction import (
    ContractiveConv2d,
    ContractiveLinear,
    conv_norm_bound,
    project,
    project_rows,
    projected,
)
from equipoise.equilibrium.correction import correction_loss
from equipoise.equilibrium.dropout import VariationalDropout, VariationalDropout2d
from equipoise.equilibrium.fixed_point import Solution, solve
from equipoise.equilibrium.layer import Equilibrium, layers, set_budget
from equipoise.equilibrium.normalisation import SpectralNorm, spectral_norm, weight_norm
from equipoise.equilibrium.options import Options
from equipoise.equilibrium.regularisation import jacobian_norm
from equipoise.equilibrium.solve_stats import NotConverged, Solves, SolveStats
from equipoise.equilibrium.solvers import SOLVERS, Anderson, Broyden, Plain, Solver
from equipoise.equilibrium.spectrum import spectral_radius
from equipoise.equilibrium.warm_start import WarmStart

__all__ = [
    "SOLVERS",
    "Anderson",
    "Broyden",
    "ContractiveConv2d",
    "ContractiveLinear",
    "Equilibrium",
    "NotConverged",
    "Options",
    "Plain",
    "Solution",
    "SolveStats",
    "Solver",
    "Solves",
    "SpectralNorm",
    "VariationalDropout",
    "VariationalDropout2d",
    "WarmStart",
    "auxiliary_layers",
    "auxiliary_loss",
    "conv_norm_bound",
    "correction_loss",
    "jacobian_norm",
    "layers",
    "project",
    "project_rows",
    "projected",
    "set_budget",
    "solve",
    "spectral_norm",
    "spectral_radius",
    "weight_norm",
]
