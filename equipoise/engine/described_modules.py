"""What the file of a model says about modules that an algorithm has put into it, and how they are put there again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.own_modules import HasOwnModules, with_own_modules
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import Selection, selectors
from equipoise.registry import choose, name_of


def described_own_modules(algorithm: Algorithm | None, head: Selection | None) -> dict[str, Any]:
    """Return what is needed to put an algorithm's own modules into a model again; nothing if it has none.

    Args:
        algorithm: the algorithm; None if it is not known.
        head: the model's head.
    """
    if not isinstance(algorithm, HasOwnModules) or head is None:
        return {}
    named = {"name": name_of(ALGORITHMS, algorithm), **algorithm.table()}
    named.pop("schedule", None)  # it may be the user's own code
    return {"own_modules": {"head": str(selectors(head, "head")[0]), "algorithm": named}}


def with_described_modules(path: str | Path, module: nn.Module, described: Mapping[str, Any]) -> nn.Module:
    """Return the module with the own modules of the algorithm that trained it, if its file describes any.

    Args:
        path: the file, for error messages.
        module: the model without them.
        described: what the file says.
    """
    own = described.get("own_modules")
    if own is None:
        return module
    table = own.get("algorithm") if isinstance(own, dict) else None
    head = own.get("head") if isinstance(own, dict) else None
    if not isinstance(table, dict) or head not in dict(module.named_modules()):
        raise EquipoiseError(f"{path} cannot be read as a model: it does not say how its algorithm changed the model")
    if table.get("name") not in ALGORITHMS or "schedule" in table:  # a file must not name code to run
        return module
    return with_own_modules(module, head, choose(ALGORITHMS, table, "algorithm")[1])
