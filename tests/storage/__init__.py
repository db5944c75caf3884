"""Tests of run folders and of what is found in them."""
