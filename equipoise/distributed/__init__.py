"""One simulation in several processes: which clients belong to which process, and what they exchange."""
