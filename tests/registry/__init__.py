"""Tests of equipoise.registry."""
