"""Deployment: the same algorithms on real machines, as a Flower app for its SuperLink and its SuperNodes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.flower.apps import App as App

__all__ = ["App"]


def __getattr__(name: str) -> Any:
    """Import the app when it is first used: PyTorch takes seconds to load, and starting programs does not need it."""
    if name != "App":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.flower.apps import App

    globals()[name] = App
    return App
