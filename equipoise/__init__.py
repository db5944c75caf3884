"""Personalised federated learning: every client ends with a model of its own, and all learn from each other."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise._public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Names come when they are asked for: PyTorch takes seconds to load, and not all need it."""
        ours = find_spec(f"{__name__}.{name}") is not None  # a module: the import that asked finds it by itself
        public = None if ours or (name[0] == "_" and name != "__all__") else import_module(f"{__name__}._public")
        if not hasattr(public, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(public, name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
