"""The tables and figures of the papers: the runs that they need, and comparisons with the published results."""
