"""Rules that mix messages before a reducer sees them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.errors import EquipoiseError
from equipoise.reducers import REDUCERS, Krum, Mean, Median, ReductionContext, TrimmedMean
from equipoise.reducers.bucketing import Bucketing
from equipoise.reducers.nearest_neighbours import NearestNeighbours
from equipoise.state import State
from tests.reducers.test_defences import close, normal
from tests.support.reducers import QUIET, reduced, uploads

NNM = {"name": "nnm", "malicious": 0.25}


def mixed(mixer: object, rows: torch.Tensor, who: tuple[int, ...] | None = None, **context: int) -> torch.Tensor:
    return mixer(uploads(rows, who=who), ReductionContext(State(), **context)).matrix


def test_nearest_neighbours() -> None:
    values = torch.tensor([0.0, 1, 3, 10]).double()[:, None].expand(4, 3)
    rows = mixed(NearestNeighbours(malicious=0.25), values) @ values
    close(rows[:, 0], 4 / 3, 4 / 3, 4 / 3, 14 / 3)
    close(reduced(Median(before=(NNM,)), values), *[4 / 3] * 3)
    close(reduced(Mean(before=(NNM,)), values), *[13 / 6] * 3)
    close(mixed(NearestNeighbours(malicious=0.0), values).flatten(), *[0.25] * 16)


def test_a_message_from_far_away_is_in_no_other_ones_neighbourhood() -> None:
    rows = normal(4)
    rows[1] = 1e9
    matrix = mixed(NearestNeighbours(malicious=0.25), rows)
    assert matrix[[0, 2, 3], 1].eq(0).all()
    close(matrix.sum(1), 1, 1, 1, 1)


@settings(max_examples=20)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_buckets(n: int, size: int, round: int) -> None:
    matrix = mixed(Bucketing(size=size), normal(n), round=round)
    assert len(matrix) == -(-n // size)
    torch.testing.assert_close(matrix.sum(1), torch.ones(len(matrix)).double())
    assert (matrix > 0).sum(0).eq(1).all()  # every client in one group
    assert (matrix > 0).sum(1).max() <= size
    assert torch.equal(matrix, mixed(Bucketing(size=size), normal(n), round=round))


def test_groups_follow_names_and_change_with_the_round() -> None:
    rows, order = normal(8), [5, 2, 7, 0, 1, 6, 4, 3]
    one, other = mixed(Bucketing(), rows), mixed(Bucketing(), rows, who=tuple(order))
    torch.testing.assert_close(one[:, order], other)
    assert any(not torch.equal(one, mixed(Bucketing(), rows, round=k)) for k in (2, 3))


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "geometric-median", "norm-bound", "centered-clip", "rfa"])
def test_groups_of_one_change_nothing(name: str) -> None:
    rows = normal(9)
    with_groups = REDUCERS[name](before=({"name": "bucketing", "size": 1},))
    torch.testing.assert_close(reduced(with_groups, rows), reduced(REDUCERS[name](), rows))


def test_means_of_buckets() -> None:
    rows = normal(8)
    for size in (2, 4, 8, 20):
        for rule in (Mean, Median)[: 1 if size < 8 else 2]:
            found = reduced(rule(before=({"name": "bucketing", "size": size},)), rows)
            torch.testing.assert_close(found, rows.mean(0))


def test_the_rule_counts_malicious_clients_not_malicious_rows() -> None:
    """6 of 25 clients can spoil 6 of 13 buckets: the trimmed mean drops 6 at each end, and Krum cannot bear it."""
    rows, buckets = normal(25), ({"name": "bucketing"},)
    torch.testing.assert_close(
        reduced(TrimmedMean(trim=0.24, before=buckets), rows), reduced(Median(before=buckets), rows)
    )
    with pytest.raises(EquipoiseError, match=r"there are 13 rows, of which up to 6 .* Krum needs more than 14"):
        reduced(Krum(malicious=0.24, before=buckets), rows)


@pytest.mark.parametrize("name", [name for name in QUIET if name not in ("foolsgold", "crfl", "fltrust", "bulyan")])
def test_every_rule_sees_the_mixtures_and_nothing_else(name: str) -> None:
    """Reducing mixtures is reducing their rows."""
    rows = normal(9)
    rule = QUIET[name]
    before = (NearestNeighbours(malicious=0.2),)
    expected = reduced(rule, mixed(before[0], rows) @ rows)
    torch.testing.assert_close(reduced(rule.model_copy(update={"before": before}), rows), expected)


def test_from_left_to_right() -> None:
    rows = normal(9)
    both = Median(before=({"name": "nnm"}, {"name": "bucketing", "size": 3}))
    first = mixed(NearestNeighbours(), rows) @ rows
    torch.testing.assert_close(reduced(both, rows), reduced(Median(before=both.before[1:]), first))


def test_what_is_no_list_of_mixers_is_refused() -> None:
    with pytest.raises(EquipoiseError, match=r'must be a list of tables such as \{name = "nnm"\}'):
        Median(before="nnm")
    with pytest.raises(EquipoiseError, match=r"reducer.before.name = 'nmm' is unknown; did you mean 'nnm'"):
        Median(before=({"name": "nmm"},))
