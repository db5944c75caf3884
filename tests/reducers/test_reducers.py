"""How one message is made of many: what every rule must do, and how many attackers each bears."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise import state as states
from equipoise.engine.client_store import ClientStore
from equipoise.engine.last_uploads import LastUploadTracker
from equipoise.reducers import REDUCERS, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean, WeightedMean
from equipoise.state import RoundUploads, State, Upload
from tests.support.reducers import QUIET, reduced

EVERY = QUIET
NUMBERED = {"sign-majority"}
"""Rules with a number in them that has the unit of the messages."""
SELECTING = {"fltrust", "foolsgold"}
"""Rules that have an opinion on clients even if they agree."""
FROM_ORIGIN = {*NUMBERED, *SELECTING, *(name for name, cls in REDUCERS.items() if cls.needs_origin)}
"""Rules whose result depends on where clients began, and need not be among the messages."""


def those(without: set[str]) -> list[str]:
    return [name for name in EVERY if name not in without]


@st.composite
def matrices(draw, least: int = 1, most: int = 12) -> Tensor:
    n, d = draw(st.integers(least, most)), draw(st.integers(3, 6))
    seed, ties = draw(st.integers(0, 2**31)), draw(st.booleans())
    rng = np.random.default_rng(seed)
    rows = rng.integers(-2, 3, size=(n, d)).astype(float) if ties else rng.normal(size=(n, d))
    return torch.from_numpy(rows)


@pytest.mark.parametrize("name", list(EVERY))
@settings(max_examples=60)
@given(matrices(), st.randoms(use_true_random=False))
def test_the_order_of_messages_makes_no_difference(name: str, rows: Tensor, random) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = reduced(EVERY[name], rows[order], who=order)
    torch.testing.assert_close(reduced(EVERY[name], rows), shuffled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", those(NUMBERED))
@settings(max_examples=40)
@given(matrices(), st.floats(-50, 50), st.floats(0.1, 10))
def test_moving_and_scaling_all_messages_moves_and_scales_the_result(
    name: str, rows: Tensor, shift: float, scale: float
) -> None:
    """What clients began with moves along."""
    moved = reduced(EVERY[name], scale * rows + shift, origin=torch.full_like(rows[0], shift))
    torch.testing.assert_close(moved, scale * reduced(EVERY[name], rows) + shift, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", those(NUMBERED | SELECTING))
@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_messages_that_agree_are_the_result(name: str, n: int) -> None:
    row = torch.tensor([1.5, -2.0, 0.25, 3e5]).double()
    torch.testing.assert_close(reduced(EVERY[name], row.expand(n, 4)), row)


@pytest.mark.parametrize("name", those(FROM_ORIGIN))
@settings(max_examples=60)
@given(matrices())
def test_the_result_is_among_the_messages_coordinate_by_coordinate(name: str, rows: Tensor) -> None:
    result = reduced(EVERY[name], rows)
    assert (result >= rows.amin(0) - 1e-9).all()
    assert (result <= rows.amax(0) + 1e-9).all()


def test_krum_shares_a_place_among_three_exactly() -> None:
    rows = torch.eye(3).double() * 3 - 2  # each as far from the others
    assert torch.equal(reduced(Krum(), rows), rows.mean(0))


HUGE = (0.0, 1.0, -1e3, 1e12, 3e38)


@st.composite
def attacked(draw) -> tuple[Tensor, Tensor]:
    """Honest messages, and as many attackers as all robust rules here bear: 2 f + 2 < n, f <= n / 5."""
    f = draw(st.integers(1, 4))
    n = draw(st.integers(5 * f, 5 * f + 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    honest = torch.from_numpy(rng.normal(size=(n - f, 5)) + rng.normal(size=5))
    size = draw(st.sampled_from(HUGE))
    same = draw(st.booleans())
    bad = torch.from_numpy(rng.normal(size=(1 if same else f, 5))).expand(f, 5) * size
    return honest, bad + honest.mean(0)


ROBUST = {
    "median": Median(),
    "trimmed-mean": TrimmedMean(trim=0.25),
    "krum": Krum(malicious=0.25),
    "multi-krum": MultiKrum(malicious=0.25),
    "geometric-median": GeometricMedian(),
}


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
@settings(max_examples=100)
@given(attacked())
def test_within_the_honest_range_of_every_coordinate(name: str, both: tuple[Tensor, Tensor]) -> None:
    honest, bad = both
    result = reduced(ROBUST[name], torch.cat([bad, honest]))
    assert (result >= honest.amin(0)).all()
    assert (result <= honest.amax(0)).all()


@pytest.mark.parametrize("name", list(ROBUST))
@settings(max_examples=100)
@given(attacked())
def test_within_reach_of_the_honest_whatever_attackers_send(name: str, both: tuple[Tensor, Tensor]) -> None:
    """Never further from the honest mean than a few times the furthest honest message (Pillutla et al., Lemma 2.1)."""
    honest, bad = both
    n, f = len(honest) + len(bad), len(bad)
    centre = honest.mean(0)
    radius = (honest - centre).norm(dim=1).max().item()
    distance = (reduced(ROBUST[name], torch.cat([bad, honest])) - centre).norm().item()
    reach = {"geometric-median": 2 * (n - f) / (n - 2 * f), "krum": 4.0, "multi-krum": 4.0}.get(name, math.sqrt(5))
    assert distance <= reach * radius * (1 + 1e-6)


@pytest.mark.parametrize("name", ["krum", "multi-krum"])
@settings(max_examples=60)
@given(attacked())
def test_krum_takes_no_message_from_far_away(name: str, both: tuple[Tensor, Tensor]) -> None:
    honest, bad = both
    far = bad + 1e3
    f = len(bad)
    reducer = REDUCERS[name](malicious=f / (len(honest) + f))
    result = reduced(reducer, torch.cat([far, honest]))
    if name == "krum":
        assert min((result - row).norm() for row in honest) < 1e-9
    else:
        torch.testing.assert_close(result, honest.mean(0))


def test_one_attacker_moves_the_mean_anywhere_and_a_majority_moves_the_median() -> None:
    honest = torch.randn(6, 4, dtype=torch.float64)
    one = torch.cat([honest, torch.full((1, 4), 1e9)])
    assert reduced(EVERY["mean"], one).abs().max() > 1e8
    many = torch.cat([honest, torch.full((7, 4), 1e9)])
    assert reduced(EVERY["median"], many).abs().max() > 1e8


def test_weights_count_where_they_are_asked_for() -> None:
    rows, weights = torch.eye(4).double(), [1.0, 2.0, 3.0, 4.0]
    torch.testing.assert_close(reduced(WeightedMean(), rows, weights), torch.tensor(weights).double() / 10)
    torch.testing.assert_close(reduced(EVERY["mean"], rows, weights), torch.full((4,), 0.25).double())


def test_the_median_of_an_even_number_is_in_the_middle() -> None:
    rows = torch.tensor([[0.0, 1, 5], [2, 3, 5], [10, 7, 5], [4, 100, 5]]).double()
    assert reduced(Median(), rows).tolist() == [3.0, 5.0, 5.0]


def test_the_trimmed_mean_leaves_out_as_many_at_either_end() -> None:
    rows = torch.arange(10.0).double()[:, None].expand(10, 3) ** 2
    expected = (np.arange(10) ** 2)[2:8].mean()
    torch.testing.assert_close(reduced(TrimmedMean(trim=0.2), rows), torch.full((3,), expected).double())


def test_krum_by_its_definition() -> None:
    torch.manual_seed(3)
    rows = torch.randn(9, 5, dtype=torch.float64)
    f = 2
    scores = []
    for i in range(9):
        distances = sorted(float((rows[i] - rows[j]).square().sum()) for j in range(9) if j != i)
        scores.append(sum(distances[: 9 - f - 2]))
    order = np.argsort(scores)
    torch.testing.assert_close(reduced(Krum(malicious=2 / 9), rows), rows[order[0]])
    torch.testing.assert_close(reduced(MultiKrum(malicious=2 / 9), rows), rows[order[: 9 - f].tolist()].mean(0))


def test_the_geometric_median_has_the_smallest_sum_of_distances() -> None:
    torch.manual_seed(1)
    for n in (3, 4, 11):
        rows = torch.randn(n, 5, dtype=torch.float64)
        result = reduced(GeometricMedian(), rows)
        slope = sum((result - row) / (result - row).norm() for row in rows)
        if min((result - row).norm() for row in rows) > 1e-6:
            assert slope.norm() < 1e-5
        for _ in range(50):
            other = result + 0.1 * torch.randn(5, dtype=torch.float64)
            assert (rows - result).norm(dim=1).sum() <= (rows - other).norm(dim=1).sum() + 1e-9


@pytest.mark.parametrize("name", list(EVERY))
def test_a_huge_message_leaves_the_result_finite(name: str) -> None:
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))  # float32, as usual
    rows[4] = 1e30
    assert reduced(EVERY[name], rows).isfinite().all()


@pytest.mark.parametrize("name", list(EVERY))
def test_blocks_of_coordinates_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(7, 33, dtype=torch.float64)
    whole = reduced(EVERY[name], rows)
    monkeypatch.setattr(states, "_BLOCK_BYTES", 8 * 7 * 4)
    torch.testing.assert_close(reduced(EVERY[name], rows), whole)


@pytest.mark.parametrize("name", those({"fltrust"}))
@pytest.mark.parametrize("on_disk", [False, True])
def test_the_last_messages_of_all_clients(name: str, on_disk: bool, tmp_path: Path) -> None:
    """Whoever takes part, the rule sees every client's last message; in a mean those never heard of count as well."""
    clients, first = 6, State(u=torch.tensor([1.0, 2.0, 3.0]))
    last = LastUploadTracker(first, clients)
    store = ClientStore(0, last.initial, tmp_path if on_disk else None, 1)
    truth: dict[int, Tensor] = {}
    rng = np.random.default_rng(0)
    for _ in range(12):
        who = sorted(rng.choice(clients, 2, replace=False).tolist())
        new = {k: torch.from_numpy(rng.normal(size=3)).float() for k in who}
        sent = RoundUploads(tuple(who), tuple(Upload(State(u=new[k])) for k in who))
        everyone = last.with_round(sent, store)
        truth |= new
        unheard = clients - len(truth) if name in ("mean", "weighted-mean", "crfl") else 0
        rows = [*truth.values(), *[first.u] * unheard]
        expected = EVERY[name](RoundUploads(tuple(range(len(rows))), tuple(Upload(State(u=row)) for row in rows)))
        torch.testing.assert_close(EVERY[name](everyone).u, expected.u, rtol=1e-5, atol=1e-6)
        for k, kept in last.take(everyone).items():
            store.put(k, kept)
        store.flush()
        if on_disk:
            store.kept.states.clear()
            store.kept.bytes = 0
            assert not store.changed.states  # what is read comes from files
    assert set(last.tensors()) == {"last.heard", "last.total.u"}
    again = LastUploadTracker(first, clients)
    again.restore(last.tensors())
    assert torch.equal(again.total.u, last.total.u)
    assert again.known == last.known


def test_more_clients_than_were_announced_all_count() -> None:
    last = LastUploadTracker(State(u=torch.zeros(2)), 1)
    store = ClientStore(0, last.initial)
    for k, value in enumerate((2.0, 4.0, 9.0)):
        everyone = last.with_round(RoundUploads((k,), (Upload(State(u=torch.full((2,), value))),)), store)
        for who, kept in last.take(everyone).items():
            store.put(who, kept)
    assert everyone.mean().u.tolist() == [5.0, 5.0]
    assert everyone.clients == 3


@pytest.mark.parametrize("huge", [1e9, 1e25, 3e38])
def test_a_huge_message_that_is_taken_back_leaves_nothing_behind(huge: float) -> None:
    last = LastUploadTracker(State(u=torch.zeros(2)), 3)
    store = ClientStore(0, last.initial)
    for who, value in ((0, huge), (1, 1.5), (0, 2.5), (1, 1.25)):
        everyone = last.with_round(RoundUploads((who,), (Upload(State(u=torch.full((2,), value))),)), store)
        for client, kept in last.take(everyone).items():
            store.put(client, kept)
    assert everyone.mean().u.tolist() == pytest.approx([3.75 / 3] * 2)


def test_the_sum_does_not_drift() -> None:
    last, rng = LastUploadTracker(State(u=torch.zeros(4)), 3), np.random.default_rng(0)
    store = ClientStore(0, last.initial)
    for round in range(3000):
        new = torch.from_numpy(1e4 * rng.normal(size=4)).float()
        everyone = last.with_round(RoundUploads((round % 3,), (Upload(State(u=new)),)), store)
        for who, kept in last.take(everyone).items():
            store.put(who, kept)
    rows = torch.stack([store.get(k)["sent.u"] for k in range(3)]).double()
    torch.testing.assert_close(last.total.u, rows.sum(0), rtol=1e-11, atol=1e-7)


def test_last_uploads_reduced_to_some_fields_still_hold_every_client() -> None:
    last = LastUploadTracker(State(u=torch.zeros(2), n=torch.ones(1)), 4)
    store = ClientStore(0, last.initial)
    for who in range(3):
        message = State(u=torch.full((2,), float(who)), n=torch.full((1,), 10.0 * who))
        everyone = last.with_round(RoundUploads((who,), (Upload(message, weight=torch.full((1,), 7.0)),)), store)
        for client, kept in last.take(everyone).items():
            store.put(client, kept)
    some = everyone.only("n")
    assert len(some) == len(everyone) == 3
    assert torch.equal(some.mean().n, everyone.mean().n)
    assert some.mean().n.tolist() == [(0 + 10 + 20 + 1) / 4]  # one has not taken part yet
    assert some.columns("n", 0, 1).flatten().tolist() == [0, 10, 20]
    assert set(some.like) == {"n"}
