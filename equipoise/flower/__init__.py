"""Deployment: the same algorithms on real machines, as a Flower app for its SuperLink and its SuperNodes."""

from equipoise.flower.apps import App

__all__ = ["App"]
