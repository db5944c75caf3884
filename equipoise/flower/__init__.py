"""The same algorithms over real machines, on Flower: its SuperLink and SuperNodes carry our two apps."""

from equipoise.flower.apps import App

__all__ = ["App"]
