"""Callbacks of a run: their interface, and those that send its results to an experiment tracker."""
