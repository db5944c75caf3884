"""Training and scoring the clients of a round: one client per thread, or many stacked in one call."""
