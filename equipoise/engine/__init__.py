"""The rounds of a run: the simulator, checkpoints, the clients' states, aggregation and the summary."""
