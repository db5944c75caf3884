"""Marks of single cases of a test."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *quick: Any, several: bool = False) -> list[Any]:
    """Return the cases of a test, of which all but the quick ones are marked as slow.

    Args:
        cases: all cases.
        quick: those that `make test-fast` runs.
        several: whether a case is a tuple of several arguments, and not one.
    """
    return [
        pytest.param(*(case if several else [case]), marks=() if case in quick else pytest.mark.slow) for case in cases
    ]
