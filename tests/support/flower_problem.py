"""The problems of the tests that kill a server."""

from equipoise.algorithms import Learn2pFed
from tests.support.problems import classification, small_mlp

PROBLEM = (classification(4), small_mlp(), {"name": "flame", "batch": 4})


OPTIONS = {"rounds": 4, "attack": {"name": "sign-flip", "fraction": 0.25}, "reducer": {"name": "median"}}
"""The server has last messages and malicious clients to remember, too."""

METHOD = Learn2pFed(cells=2, lr=0.05, batch=4, lam=1.0, rho=1.0, eta=1.0, gamma=1.0, theta=1.0, outer_lr=0.1)
"""Has several exchanges in a round."""
