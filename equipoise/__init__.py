"""Personalised federated learning: every client ends with a model of its own, and all learn from each other."""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = version("equipoise")

if TYPE_CHECKING:
    from equipoise._public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: PyTorch takes seconds to load, and not everything needs it."""
        is_module = find_spec(f"{__name__}.{name}") is not None  # the import statement finds it by itself
        private = name[0] == "_" and name != "__all__"
        public = None if is_module or private else import_module(f"{__name__}._public")
        if not hasattr(public, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(public, name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
