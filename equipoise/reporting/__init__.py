"""Comparisons, plots, the live view and the HTML report of runs, made from their folders."""
