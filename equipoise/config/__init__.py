"""The settings of an experiment: reading them from a file, checking them, and the types that hold them."""
