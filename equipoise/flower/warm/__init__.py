"""Warm clients: one resident process imports everything once and forks for every message of a SuperNode.

A SuperNode starts the program `flwr-clientapp` for every message, found by name on its PATH. `shim.py` is a program of
that name that comes first on the PATH and passes the message on to the resident process (`resident.py`), whose forked
child (`child.py`) runs Flower's own entry point. Whenever that does not work, the shim runs the real program instead.
"""
