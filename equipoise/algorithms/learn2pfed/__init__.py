"""Learn2pFed: unrolled ADMM."""

from equipoise.algorithms.learn2pfed.learn2pfed import Learn2pFed

__all__ = ["Learn2pFed"]
