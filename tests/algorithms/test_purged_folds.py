"""Folds of windows of time series: no value that a fold is judged by is one that its network was fitted to."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.algorithms import Learn2pFed
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.learn2pfed.fits import LossFit, LossJudge
from equipoise.algorithms.learn2pfed.head import Sides, Trials
from equipoise.algorithms.local_data import LocalData
from equipoise.data.federation import Federation
from equipoise.data.purged_windows import purged_windows
from equipoise.models.base import BodyAndHead
from equipoise.representations.head_moments import Moments
from equipoise.state import State, Upload
from tests.support import series
from tests.support.problems import simulation
from tests.support.unrolled import BEGIN, LOSS, central, check_gradients, gap

FOLDS = 3
SEEN: list[tuple[Sides, Moments]] = []


def windows(horizon: int, hours: int = 70) -> Federation:
    made = series.federation(3, hours=hours, window=5, horizon=horizon, split=(0.5, 0.3, 0.2))
    return replace(made, chronological=True)


def linear(horizon: int) -> torch.nn.Module:
    return BodyAndHead(torch.nn.Identity(), torch.nn.Linear(5, horizon))


class Looks(Algorithm):
    """Trains nothing, and looks at what folds would be fitted to and judged on."""

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        trials = Trials("loss", "folds", FOLDS, "auto")
        model = data.descend(down.w, steps=1) * 0
        sides = trials.from_loss(model, data, judged=True)
        SEEN.append((sides, data.moments(model, groups=FOLDS)))
        return client, Upload(State(w=down.w), reference=down, weight=data.size)

    def init_server(self, start: Any) -> State:
        return State(w=start.w0)

    def aggregate(self, server: State, uploads: Any, reduce: Any) -> State:
        return reduce(uploads)


def looked(federation: Federation, horizon: int, mode: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each client, which training samples each network is fitted to, and on which it is judged."""
    SEEN.clear()
    run = simulation(Looks(lr=0.1), federation, linear(horizon), loss="squared", rounds=1, participation=1.0, mode=mode)
    run.run()
    del SEEN[0]  # where the hooks were called to learn the shapes of messages
    found = []
    for sides, _ in SEEN:
        assert isinstance(sides.fit, LossFit)
        assert isinstance(sides.judge, LossJudge)
        pairs = [each.weights > 0 for each in (sides.fit, sides.judge)]
        fitted, judged = (each if each.ndim == 3 else each[None] for each in pairs)
        found += [(f.numpy(), j.numpy()) for f, j in zip(fitted, judged, strict=True)]
    return found


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize("horizon", [1, 2, 6])
def test_no_target_hour_of_a_fold_is_one_of_its_held_out_block(horizon: int, mode: str) -> None:
    federation = windows(horizon)
    facts = federation.series
    assert facts is not None
    found = looked(federation, horizon, mode)
    assert len(found) == len(federation)
    for who, (fitted, judged) in enumerate(found):
        begins = facts.target[federation.train[who]]
        hours = [set(range(begin, begin + horizon)) for begin in begins.tolist()]
        for fold in range(FOLDS):
            held = set().union(*(hours[k] for k in np.flatnonzero(judged[fold])))
            learned = set().union(*(hours[k] for k in np.flatnonzero(fitted[fold])))
            assert held
            assert learned
            assert not held & learned
            # Nothing else is lost: what is neither fitted to nor judged on forecasts an hour of the block.
            for k in np.flatnonzero(~fitted[fold] & ~judged[fold]):
                assert hours[k] & held
        assert fitted[FOLDS][: len(hours)].all()  # the last network is fitted to all
        assert not judged[FOLDS].any()


def test_moments_are_purged_like_samples() -> None:
    """Squares see only moments: those of all but a block and its neighbours are those of what the loss is fitted to."""
    found = looked(windows(3), 3, "threads")
    for (fitted, judged), (_, moments) in zip(found, SEEN, strict=True):
        assert moments.purged is not None
        left = moments.n.sum() - moments.n - moments.purged.n
        assert left.flatten().tolist() == fitted[:FOLDS].sum(1).tolist()
        assert moments.n.flatten().tolist() == judged[:FOLDS].sum(1).tolist()


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize("fit", [{}, LOSS, {"network": "joint", "lr": 0.1}], ids=["squares", "loss", "joint"])
def test_the_way_back_is_that_of_the_network_on_purged_folds(fit: dict[str, Any], mode: str) -> None:
    federation = windows(2)
    algorithm = Learn2pFed(**BEGIN, **fit, outer="folds", folds=FOLDS)
    schedule = {"rounds": 1, "participation": 1.0, "mode": mode}
    run = simulation(algorithm, federation, linear(2), loss="squared", **schedule)
    run.run()
    whole = central(run)
    whole.start([algorithm.init_client(run.start).raw] * len(run.federation))
    check_gradients(run, whole)


@pytest.mark.parametrize("fit", [{}, LOSS], ids=["squares", "loss"])
def test_one_step_ahead_nothing_is_purged(fit: dict[str, Any]) -> None:
    """The numbers are those of data of which nobody knows the hours; further ahead they are not."""
    algorithm = Learn2pFed(**BEGIN, **fit, outer="folds", folds=FOLDS)
    same = {}
    for horizon in (1, 2):
        federation = windows(horizon)
        pair = [federation, replace(federation, series=None)]
        runs = [
            simulation(algorithm, data, linear(horizon), loss="squared", rounds=2, participation=1.0) for data in pair
        ]
        for run in runs:
            run.run()
        same[horizon] = torch.equal(runs[0].server.w, runs[1].server.w)
    assert same == {1: True, 2: False}


def test_interleaved_folds_are_what_was_asked_for() -> None:
    """Every window is a neighbour of a held-out one there, so that nothing would be left."""
    federation = windows(2)
    algorithm = Learn2pFed(**BEGIN, outer="folds", folds=FOLDS, fold_order="interleaved")
    found = []
    for data in (federation, replace(federation, series=None)):
        run = simulation(algorithm, data, linear(2), loss="squared", rounds=1, participation=1.0)
        run.run()
        found.append(run.server.w)
    assert gap(*found) == 0


def test_windows_far_apart_and_series_of_others_are_kept() -> None:
    facts = windows(3).series
    assert facts is not None
    samples = np.flatnonzero(facts.owner == 0)[::3]  # windows whose targets follow each other without overlap
    assert purged_windows(facts, samples, [slice(0, 2), slice(2, len(samples))]) is not None
    assert all(not len(rows) for rows in purged_windows(facts, samples, [slice(0, 2), slice(2, 9)]) or [])
    ends = [np.flatnonzero(facts.owner == 0)[-1], np.flatnonzero(facts.owner == 1)[0]]
    mixed = purged_windows(facts, np.array(ends), [slice(0, 1), slice(1, 2)])
    assert [len(rows) for rows in mixed or []] == [0, 0]
    assert purged_windows(None, samples, [slice(0, 2), slice(2, 4)]) is None
