"""Helpers of the tests: small problems, servers and files."""
