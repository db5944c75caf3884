"""Runs of a thousand million rounds begin at once, with noise that is enough for all of them."""

from collections import Counter
from typing import Any

import pytest

import equipoise as eq
from equipoise.config.engine import Schedule
from equipoise.engine import simulated_releases
from equipoise.engine.privacy_ledger import PrivacyLedger
from equipoise.engine.simulated_releases import SimulatedReleases
from equipoise.engine.simulation import Simulation
from tests.support.problems import classification, small_mlp

LONG = 10**9


class BegunError(Exception):
    """The first round has begun."""


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds that cohorts are drawn for; the run ends with its first round, as drawing a second cohort is an error."""
    drawn: list[int] = []
    sample = Simulation.sample

    def counted(self: Simulation, round: int) -> list[int]:
        if drawn:
            raise BegunError
        drawn.append(round)
        return sample(self, round)

    monkeypatch.setattr(Simulation, "sample", counted)
    return drawn


@pytest.mark.parametrize("noise", [{"target_epsilon": 5.0}, {"target_epsilon": 5.0, "per": "release"}, {"sigma": 0.1}])
@pytest.mark.parametrize("where", ["local", "central"])
@pytest.mark.filterwarnings("ignore::equipoise.RunWarning")
def test_a_very_long_private_run_begins_at_once(noise: dict[str, Any], where: Any, stops: list[int]) -> None:
    privacy = eq.Privacy(clip=1.0, where=where, **noise)
    with pytest.raises(BegunError):
        eq.train(small_mlp(), classification(4), "fedavg", rounds=LONG, participation=0.5, privacy=privacy)
    assert stops == [1]


@pytest.mark.filterwarnings("ignore::equipoise.RunWarning")
def test_an_own_schedule_is_tried_for_some_rounds_of_a_very_long_run(stops: list[int]) -> None:
    tried = []

    def factor(round: int, rounds: int) -> float:
        tried.append(round)
        return 1.0

    algorithm = eq.FedAvg(schedule=factor)
    with pytest.raises(BegunError):
        eq.train(small_mlp(), classification(4), algorithm, rounds=LONG, participation=0.5)
    before = tried[: tried.index(LONG) + 1]
    assert 100_000 <= len(before) <= 100_002
    assert before[:2] == [1, 10_001]


class Pipeline:
    """What the count of releases needs of a pipeline."""

    class settings:
        privacy = eq.Privacy(clip=1.0, sigma=1.0)

    algorithm = eq.FedAvg()
    ledger = PrivacyLedger(settings.privacy)
    bands = ()


def planned(rounds: int, sample: Any) -> int:
    schedule = Schedule(rounds=rounds, participation=2)
    return SimulatedReleases(Pipeline, schedule, 4, 2, sample).planned().releases.rounds  # type: ignore


def test_ordinary_runs_count_what_the_cohorts_will_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_releases, "_DRAWN_ROUNDS", 30)

    def sample(round: int) -> list[int]:
        return [round % 3, 3]

    counts = Counter(who for round in range(1, 31) for who in sample(round))
    assert planned(30, sample) == max(counts.values()) == 30
    assert planned(30, lambda round: [round % 4, (round + 1) % 4]) == 15 + 1


def test_no_client_releases_more_than_is_planned_for_a_very_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_releases, "_DRAWN_ROUNDS", 30)

    def never(round: int) -> list[int]:
        raise AssertionError("a cohort was drawn beforehand")

    assert planned(31, never) == 31
