"""Differential privacy of uploads: mechanisms that clip and add noise, and the accounting of epsilon."""
