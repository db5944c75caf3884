"""The problem of the tests that kill a server."""

from tests.support.problems import classification, small_mlp

PROBLEM = (classification(4), small_mlp(), {"name": "flame", "batch": 4})


OPTIONS = {"rounds": 4, "attack": {"name": "sign-flip", "fraction": 0.25}, "reducer": {"name": "median"}}
"""The server has last messages and malicious clients to remember, too."""
