"""Modules that an algorithm adds to the model: they take the place of its head, and contain it."""

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from equipoise import randomness
from equipoise.errors import EquipoiseError


class HasOwnModules(ABC):
    """The algorithm has modules of its own, whose parameters belong to the vector of the model like all others.

    Both engines put them into the model before anything else is done with it. So they are trained, sent and kept as the
    algorithm's hooks say, and personal models contain them. `ParameterSpace.span` and `mask` find their parameters by
    their classes; what they compute is read at the points `within_head`.
    """

    @abstractmethod
    def around(self, head: nn.Linear) -> nn.Module:
        """Return the module that takes the place of the head and contains it, with initial values for all clients."""


class OwnTensor(nn.Module):
    """A tensor of an algorithm's own as a part of the model; the base of classes that are looked up in the vector."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = nn.Parameter(value)


class OwnHead(nn.Module):
    """A head within an algorithm's own modules, such as that of the model."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        """Return the outputs, given what the body makes."""
        found: Tensor = self.layer(h)
        return found


def with_own_modules(
    module: nn.Module, head: str | None, algorithm: object, seed: int = 0, chosen: str = "nothing"
) -> nn.Module:
    """Return a copy of a module with the algorithm's own modules around its head.

    It is the module itself if the algorithm has none, or if they are there already.

    Args:
        module: the model.
        head: name of the submodule that is its head; None if it is not exactly one.
        algorithm: the algorithm.
        seed: seed of the run, which determines what the modules draw.
        chosen: the parameters that form the head, for an error message.
    """
    if not isinstance(algorithm, HasOwnModules):
        return module
    found = None if head is None else module.get_submodule(head)
    if found is not None and any(isinstance(layer, (OwnTensor, OwnHead)) for layer in found.modules()):
        return module
    if type(found) is not nn.Linear or not all(p.requires_grad for p in found.parameters()):
        raise EquipoiseError(
            f"{type(algorithm).__name__} puts modules of its own around the model's head, so the head must be one "
            "submodule, a linear layer of which nothing is frozen; here it is "
            f"{chosen if found is None else f'{head} ({type(found).__name__})'}; name it with head="
        )
    assert head is not None
    module = copy.deepcopy(module)
    parent, _, name = head.rpartition(".")
    inner = module.get_submodule(head)
    assert isinstance(inner, nn.Linear)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.key(seed, "own modules") % 2**63)
        around = algorithm.around(inner)
    setattr(module.get_submodule(parent), name, around.to(inner.weight.device, inner.weight.dtype))
    return module
