"""How often host and device exchange numbers in a round: as often for many local steps as for few."""

from typing import Any

import pytest

from equipoise.algorithms import FedReCo
from equipoise.algorithms.base import Algorithm
from tests.support.marks import slow_except
from tests.support.problems import IN_MODES, KINDS, classification, registered, simulation
from tests.support.stand_in import counts


def exchanged(algorithm: Algorithm, device: str, **options: Any) -> dict[str, int]:
    """Count what a round of training exchanges; before, there was one for all that is prepared once."""
    run = simulation(algorithm, device=device, rounds=2, participation=1.0, evaluate_every=2, **options)
    run.advance()
    before = counts()
    run.evaluates = lambda round: False  # type: ignore[method-assign]
    run.schedule = run.schedule.model_copy(update={"rounds": 3})  # the last round would be scored
    run.advance()
    after = counts()
    run.close()
    return {what: after[what] - before[what] for what in after}


@pytest.mark.parametrize(
    ("name", "mode"), slow_except(IN_MODES, *((name, "threads") for name in KINDS), ("ditto", "stacked"), several=True)
)
def test_the_copies_of_a_round_do_not_depend_on_local_steps(name: str, mode: str, stand_in: str) -> None:
    more = {"threshold": 1e9} if name == "fedala" else {}  # how many passes it makes depends on losses, and so on steps
    few, many = (
        exchanged(registered(name).model_copy(update={"steps": steps, **more}), stand_in, mode=mode) for steps in (2, 6)
    )
    assert few == many
    assert few["to_device"] > 0
    assert few["to_host"] > 0


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_nor_do_they_with_optimizers_and_terms(mode: str, stand_in: str) -> None:
    for how in ({"optimizer": "adam", "clip": 0.1}, {"momentum": 0.5, "weight_decay": 0.1}):
        few, many = (
            exchanged(registered("ditto").model_copy(update={"steps": steps, **how}), stand_in, mode=mode)
            for steps in (2, 20)
        )
        assert few == many
    few, many = (
        exchanged(FedReCo(steps=steps, batch=4, variance_reduction="partial"), stand_in, mode=mode) for steps in (2, 20)
    )
    assert few == many


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_clients_that_are_done_earlier_than_others_need_no_copies(mode: str, stand_in: str) -> None:
    """With epochs, clients of different sizes take different numbers of steps, and some wait for others."""
    few, many = (
        exchanged(registered("fedavg").model_copy(update={"epochs": epochs}), stand_in, mode=mode) for epochs in (1, 8)
    )
    assert few == many


def test_streamed_samples_cross_in_chunks_of_many_steps(stand_in: str) -> None:
    for mode in ("threads", "stacked"):
        few, many = (
            exchanged(registered("fedavg").model_copy(update={"steps": steps}), stand_in, mode=mode, data="host")
            for steps in (2, 20)
        )
        assert few == many  # these samples are few enough for one chunk


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_scores_cross_once_for_a_model_whatever_the_number_of_batches(
    mode: str, stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(batch: int) -> int:
        monkeypatch.setattr(f"equipoise.executors.{'threaded' if mode == 'threads' else 'stacked'}._SCORE_BATCH", batch)
        several = ("accuracy", "auroc")
        run = simulation(registered("local"), classification(), mode=mode, device=stand_in, metrics=several)
        run.advance()
        before = counts()["to_host"]
        run.score()
        run.scores = run.new_scores()
        run.score()
        run.close()
        return counts()["to_host"] - before

    assert scored(2) == scored(1000)
