"""Data sets and their division among clients: sources, downloads, the cache, partitions and federations."""
