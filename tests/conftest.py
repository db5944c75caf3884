"""Small federations on which everything is known."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from tests.support.browser import chromium
from tests.support.marks import slow_except
from tests.support.problems import EVERY, IN_MODES, KINDS, LeastSquares, registered
from tests.support.stand_in import stand_in

__all__ = ["chromium", "stand_in"]  # fixtures of all tests

# How long an example takes says nothing on a busy machine.
settings.register_profile("equipoise", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("equipoise")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # No test cuts the power. Waiting for the disk, thousands of times, would take minutes.
    os.fsync = lambda descriptor: None
    # Neither these tests nor the commands that they start touch the user's own cache.
    cache = tempfile.TemporaryDirectory(prefix="equipoise-test-cache-")
    config.add_cleanup(cache.cleanup)
    os.environ["EQUIPOISE_CACHE"] = cache.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
    # Files with long tests first, so that none of them begins when the other processes are about to end.
    ranks: dict[Path, int] = {}
    for item in items:
        rank = 0 if item.get_closest_marker("deployment") else 1 if item.get_closest_marker("slow") else 2
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: ranks[item.path])


@pytest.fixture(autouse=True)
def seeded_weights() -> None:
    """Make initial weights independent of chance and of the tests that ran before."""
    torch.manual_seed(0)


@pytest.fixture(params=slow_except(EVERY, *KINDS))
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    """Every registered algorithm, and variants of some; one that joins the registry joins the tests."""
    return registered(request.param)


@pytest.fixture(params=slow_except(KINDS, "ditto"))
def one_of_a_kind(request: pytest.FixtureRequest) -> Algorithm:
    return registered(request.param)


@pytest.fixture(
    params=slow_except(IN_MODES, *((name, "threads") for name in KINDS), ("ditto", "stacked")), ids="-".join
)
def in_mode(request: pytest.FixtureRequest) -> tuple[Algorithm, str]:
    """Every algorithm threaded, and one of each kind stacked; stacked equals threaded for all of them."""
    name, mode = request.param
    return registered(name), mode


@pytest.fixture
def problem() -> LeastSquares:
    return LeastSquares()


SHARED = Path(__file__).parent.parent.parent / "shared" / "data"


@pytest.fixture
def real_data() -> Path:
    if not SHARED.exists():
        pytest.skip("needs the folder of real data sets beside the project")
    return SHARED


@pytest.fixture
def remember(monkeypatch: pytest.MonkeyPatch) -> None:
    """The algorithm of tests/support/tampering.py, in the registry for as long as a test."""
    from tests.support.tampering import Remember

    monkeypatch.setitem(ALGORITHMS.entries, "remember", Remember)
