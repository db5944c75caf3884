"""A head that is one linear layer: its shape, and the matrix behind its part of the parameter vector."""

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace


class LinearHead(NamedTuple):
    """The shape of a linear head, as a matrix with one row per input."""

    inputs: int
    "number of inputs, including a constant one if there is a bias"
    outputs: int
    bias: bool

    def matrix(self, head: Tensor) -> Tensor:
        """Turn the head's vector (weights output by output, then the bias) into a matrix; the bias is its last row."""
        inputs = self.inputs - self.bias
        weight = head[..., : inputs * self.outputs].unflatten(-1, (self.outputs, inputs)).mT
        return torch.cat([weight, head[..., None, inputs * self.outputs :]], dim=-2) if self.bias else weight

    def vector(self, matrix: Tensor) -> Tensor:
        """Turn the matrix back into the head's vector."""
        inputs = self.inputs - self.bias
        weight = matrix[..., :inputs, :].mT.flatten(-2)
        return torch.cat([weight, matrix[..., inputs, :]], dim=-1) if self.bias else weight


def linear_head(space: ParameterSpace) -> LinearHead:
    """Return the shape of a model's head, or raise an error if the head is anything but one linear layer."""
    entries = [entry for entry in space.entries if entry.offset >= space.body_size]
    matrix = next((entry for entry in entries if len(entry.shape) == 2), None)
    biases = [entry for entry in entries if entry is not matrix]
    if matrix is None or len(biases) > 1 or any(entry.shape != matrix.shape[:1] for entry in biases):
        raise EquipoiseError(
            "the algorithm fits the model's head by least squares, so the head must be one linear layer; here "
            f"it is {', '.join(entry.name for entry in entries) or 'nothing (name it with head=)'}"
        )
    outputs, inputs = matrix.shape
    return LinearHead(inputs + len(biases), outputs, bool(biases))
