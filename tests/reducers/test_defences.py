"""Defences by their formulas: numbers computed by hand or by a second method."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.reducers import (
    CRFL,
    RFA,
    Bulyan,
    CenteredClip,
    DnC,
    FlameFilter,
    FLTrust,
    FoolsGold,
    GeometricMedian,
    Mean,
    Median,
    NormBound,
    ReductionContext,
    SignMajority,
)
from equipoise.reducers.bulyan import near_median
from equipoise.reducers.dnc import outlier_scores
from equipoise.reducers.flame_filter import majority_cluster
from equipoise.reducers.foolsgold import weights as foolsgold_weights
from equipoise.state import RoundUploads, State, Upload
from tests.support.reducers import reduced, uploads, with_memory


def matrix(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(found: Tensor, *expected: float, to: float = 1e-9) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=to)


def normal(n: int, d: int = 5, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


FOUR = matrix((3, 4), (0, 1), (0, -1), (100, 0))


def test_norm_bound() -> None:
    close(reduced(NormBound(), FOUR), 1.2, 0.6)
    close(reduced(NormBound(bound=2), FOUR), 0.8, 0.4)
    close(reduced(NormBound(bound=1e9), FOUR), *FOUR.mean(0).tolist())
    o = torch.tensor([7.0, -2.0]).double()
    close(reduced(NormBound(), FOUR + o, origin=o), 8.2, -1.4)
    lengths = matrix((1, 0), (2, 0), (3, 0), (4, 0), (100, 0))
    close(reduced(NormBound(bound="arc", malicious=0.2), lengths), (1 + 2 + 3 + 4 + 4) / 5, 0)
    zero = matrix((0, 0), (3, 4))
    close(reduced(NormBound(bound=1), zero), 0.3, 0.4)


def test_norm_bound_by_the_clients_weights_bounds_lengths_and_not_weights() -> None:
    close(reduced(NormBound(bound=1, weighted=True), matrix((2, 0), (0, 3)), [3.0, 1.0]), 0.75, 0.25)


def test_whatever_some_send_moves_a_bounded_mean_only_so_far() -> None:
    rows = normal(10)
    other = rows.clone()
    other[:3] = 1e6
    moved = reduced(NormBound(bound=0.5), other) - reduced(NormBound(bound=0.5), rows)
    assert moved.norm() <= 2 * 0.5 * 3 / 10 + 1e-12


def test_centered_clip() -> None:
    close(reduced(CenteredClip(tau=2), FOUR), 0.8, 0.4)
    close(reduced(CenteredClip(tau=2, iterations=2), FOUR), 1.1607209400, 0.6246248042)
    close(reduced(CenteredClip(tau=2, iterations=3), FOUR), 1.3195926070, 0.7482007344)
    close(reduced(CenteredClip(tau=1e9), FOUR), *FOUR.mean(0).tolist())


def test_centered_clip_by_coefficients_is_the_direct_loop() -> None:
    rows, o = normal(9), normal(1, seed=1)[0]
    v, tau = o, 1.7
    for _ in range(4):
        apart = rows - v
        v = v + (apart * (tau / apart.norm(dim=1)).clamp(max=1)[:, None]).mean(0)
    torch.testing.assert_close(reduced(CenteredClip(tau=tau, iterations=4), rows, origin=o), v, rtol=1e-12, atol=1e-12)


def test_centered_clip_begins_where_the_last_step_would_lead_again() -> None:
    rule, rows, o = CenteredClip(tau=1.0), normal(5), torch.zeros(5).double()
    first, memory = with_memory(rule, rows, origin=o)
    begin = first + (first - o)
    expected = reduced(rule, rows, origin=begin, memory=rule.memory(uploads(rows).like, 5))
    torch.testing.assert_close(reduced(rule, rows, origin=first, memory=memory), expected)


def test_momentum_is_a_moving_average_of_each_clients_own_differences() -> None:
    """With a huge tau the result is o plus the mean of m_i; who is absent keeps m_i and does not count."""
    rule, beta = CenteredClip(tau=1e9, momentum=0.75), 0.75
    a, b, c = (normal(3, seed=k) for k in range(3))
    o = normal(1, seed=9)[0]
    first, memory = with_memory(rule, a + o, origin=o)
    torch.testing.assert_close(first, o + a.mean(0))
    _, memory = with_memory(rule, b[:2] + o, who=(0, 2), origin=o, memory=memory)
    third, _ = with_memory(rule, c + o, origin=o, memory=memory)
    m = torch.stack([beta * a[0] + (1 - beta) * b[0], a[1], beta * a[2] + (1 - beta) * b[1]])
    torch.testing.assert_close(third, o + (beta * m + (1 - beta) * c).mean(0))


def test_a_newcomer_begins_its_average_with_its_first_difference() -> None:
    rule, rows = CenteredClip(tau=1e9, momentum=0.5), normal(3)
    _, memory = with_memory(rule, rows[:2])
    found, after = with_memory(rule, torch.cat([rows[:1], rows[2:]]), who=(0, 4), memory=memory)
    torch.testing.assert_close(found, (rows[0] + rows[2]) / 2)
    assert after["known"].tolist() == [1, 1, 0, 0, 1]


def test_momentum_of_constant_differences_changes_nothing() -> None:
    plain, heavy, rows = CenteredClip(tau=1.0), CenteredClip(tau=1.0, momentum=0.9), normal(6)
    memories = [None, None]
    for _ in range(3):
        (one, memories[0]), (other, memories[1]) = (
            with_memory(rule, rows, memory=memory) for rule, memory in zip((plain, heavy), memories, strict=True)
        )
        torch.testing.assert_close(one, other)


def test_bulyan() -> None:
    values = matrix((0, 1.1, 2.3, 3.6, 5, 6.5, 100)).T.expand(7, 2)
    close(reduced(Bulyan(malicious=1 / 7), values), 3.6333333333, 3.6333333333, to=1e-9)
    rows = normal(6)
    torch.testing.assert_close(reduced(Bulyan(malicious=0.0), rows), rows.mean(0))


def test_bulyan_by_its_definition() -> None:
    """Krum again and again on what is left, then the values nearest to the median."""
    rows, f = normal(12, seed=4), 2
    left, chosen = list(range(12)), []
    while len(chosen) < 12 - 2 * f:
        scores = []
        for i in left:
            apart = sorted(float((rows[i] - rows[j]).square().sum()) for j in left if j != i)
            # One neighbour alone ties for mutual neighbours: then over two, and so on.
            k = max(len(left) - f - 2, 1)
            scores.append(tuple(round(sum(apart[:m]), 9) for m in range(k, max(len(left), k + 1))))
        chosen.append(left.pop(int(min(range(len(left)), key=scores.__getitem__))))
    kept = rows[chosen]
    expected = []
    for column in kept.T:
        middle = float(np.median(column))
        expected.append(np.mean(sorted(column.tolist(), key=lambda v: abs(v - middle))[: 12 - 4 * f]))
    close(reduced(Bulyan(malicious=2 / 12), rows), *expected)


def test_bulyan_keeps_no_value_from_far_away_and_says_how_many_it_needs() -> None:
    rows = normal(7)
    rows[3] = 1e9
    assert reduced(Bulyan(malicious=1 / 7), rows).abs().max() < 3
    with pytest.raises(EquipoiseError, match=r"0.24 of 25 messages are 6, and Bulyan needs 27 rows .* at most 5"):
        reduced(Bulyan(malicious=0.24), normal(25))


def test_values_equally_far_from_the_median_share_the_last_place() -> None:
    column = torch.tensor([0.0, 2.0, 3.0, 4.0, 9.0]).double()[:, None]
    close(near_median(column, 2), (3 + 3) / 2)  # 2 and 4 share it
    close(near_median(column, 3), 3)


CROSS = matrix((1, 0), (-1, 0), (0, 1), (0, -1), (6, 6))


def test_divide_and_conquer() -> None:
    centred = CROSS - CROSS.mean(0)
    close(outlier_scores(centred @ centred.T), 0.98, 5.78, 0.98, 5.78, 46.08)
    close(reduced(DnC(malicious=0.2), CROSS), 0, 0)
    torch.testing.assert_close(reduced(DnC(malicious=0.0), CROSS), CROSS.mean(0))


def test_scores_are_squared_projections_on_the_top_singular_vector() -> None:
    rows = normal(8, 20)
    centred = rows - rows.mean(0)
    v = torch.linalg.svd(centred).Vh[0]
    torch.testing.assert_close(outlier_scores(centred @ centred.T), (centred @ v).square())


def test_a_draw_of_coordinates_looks_at_those_only() -> None:
    """An attacker who is far out in one coordinate is seen by the draws that have it, in whatever blocks."""
    rows = normal(9, 400)
    rows[2, 399] = 1e4
    assert reduced(DnC(malicious=1 / 9), rows)[399].abs() < 3
    some = reduced(DnC(malicious=1 / 9, coordinates=20, iterations=1), rows)
    assert some[399].abs() > 1e2  # seed 0, round 1: not drawn
    assert not torch.equal(some, reduced(DnC(malicious=1 / 9, coordinates=20, iterations=1), rows, round=2))


def test_if_every_message_is_removed_once_those_that_are_removed_least_often_count() -> None:
    rows = normal(6, 60, seed=2)
    result = reduced(DnC(malicious=0.45, coordinates=6, iterations=40, c=1.6), rows)
    assert result.isfinite().all()
    assert any(torch.allclose(result, rows[[k for k in range(6) if mask >> k & 1]].mean(0)) for mask in range(1, 2**6))


def test_fltrust() -> None:
    """Client "0" is trusted: its message gives length and direction, and is not in the mean."""
    rows = matrix((2, 0), (1, 1), (0, 3), (-5, 0), (4, 0))
    rule = FLTrust(root="0")
    close(reduced(rule, rows), 1.7573593129, 0.5857864376)
    close(reduced(rule, rows * matrix((1,), (7,), (0.1,), (1e6,), (3,))), 1.7573593129, 0.5857864376)
    close(reduced(rule, matrix((2, 0), (-2, 0), (-2, 0), (0, 0))), 0, 0)
    assert reduced(rule, normal(8)).norm() <= normal(8)[0].norm() + 1e-12
    with pytest.raises(EquipoiseError, match=r"root is missing"):
        reduced(FLTrust(), rows)
    with pytest.raises(EquipoiseError, match=r"'nobody' sent no message.*such as '0'"):
        reduced(FLTrust(root="nobody"), rows)


def cosine(*rows: tuple[float, ...]) -> Tensor:
    unit = torch.nn.functional.normalize(matrix(*rows), dim=1)
    return unit @ unit.T


def test_foolsgold_weights() -> None:
    close(foolsgold_weights(cosine((1, 0, 0), (0.6, 0.8, 0), (0, 0, 1), (0, 0, 1))), 1, 1, 0, 0)
    close(foolsgold_weights(cosine((1, 0, 0), (0.6, 0.8, 0), (0, 0.6, 0.8), (0, 0, 1))), 1, 1, 0.5, 0.5)
    pardoned = cosine((0.51**0.5, 0, 0.7), (0, 1, 0), (0, 0, 1), (0, 0, 1))
    close(foolsgold_weights(pardoned), 0.5400053346, 1, 0, 0)
    close(foolsgold_weights(torch.eye(5).double()), 1, 1, 1, 1, 1)


def test_foolsgold_remembers_the_sum_of_each_clients_differences() -> None:
    rule, rows = FoolsGold(), matrix((1, 0, 0), (0, 1, 0), (0, 0, 1))
    first, memory = with_memory(rule, rows)
    close(first, *[1 / 3] * 3)
    # Clients 1 and 2 pull alike from now on; their sums are what counts.
    _, memory = with_memory(rule, matrix((0, 9, 9), (0, 9, 9)), who=(1, 2), memory=memory)
    close(memory["row.a"].flatten(), 1, 0, 0, 10, 0, 9)
    last, _ = with_memory(rule, matrix((5, 0, 0), (0, 5, 5), (0, 5, 5)), memory=memory)
    assert last[0] > 4.9
    same = reduced(rule, normal(1).expand(4, 5), origin=normal(1, seed=1)[0])
    close(same, *normal(1, seed=1)[0].tolist())  # all alike: nothing moves
    scaled = rows * matrix((2,), (30,), (0.1,))
    close(reduced(rule, scaled), *(scaled.mean(0)).tolist())


def test_foolsgold_on_heads_is_for_whole_models() -> None:
    with pytest.raises(EquipoiseError, match=r"messages of Ditto are not whole models"):
        reduced(FoolsGold(features="head"), normal(3), algorithm="Ditto")
    with pytest.raises(EquipoiseError, match=r"reducer.before is not possible with FoolsGold"):
        FoolsGold(before=({"name": "nnm"},))


def test_sign_majority() -> None:
    rows = matrix((1, -2, 0), (3, -1, 1), (-100, -5, -1), (0.5, 4, 0))
    close(reduced(SignMajority(), rows), 0.001, -0.001, 0)
    close(reduced(SignMajority(step="median"), rows), 2, -3, 0)
    close(reduced(SignMajority(), rows * matrix((5,), (0.1,), (1e9,), (2,))), 0.001, -0.001, 0)
    opposing = torch.cat([rows, -rows])
    o = normal(1, 3)[0]
    assert torch.equal(reduced(SignMajority(step="median"), opposing + o, origin=o), o)


def polar(*rows: tuple[float, float]) -> Tensor:
    return torch.stack([r * torch.tensor([np.cos(np.radians(a)), np.sin(np.radians(a))]) for r, a in rows]).double()


def test_the_filter_of_flame() -> None:
    rows = polar((1, 0), (2, 10), (4, 25), (3, 90), (50, 100))
    for of in ("message", "difference"):  # the origin is zero
        close(reduced(FlameFilter(of=of, noise=0.0), rows), 1.8961796224, 0.5383837135)
    o = torch.tensor([1e3, 1e3]).double()
    close(
        reduced(FlameFilter(of="difference", noise=0.0), rows + o, origin=o), 1001.8961796224, 1000.5383837135, to=1e-7
    )


def test_the_noise_of_the_filter_is_as_long_as_a_median_message_says() -> None:
    row = torch.full((250_000,), 2e-3).double()  # length 1
    sent = RoundUploads((0, 1), (Upload(State(w=row)), Upload(State(w=row))))
    drawn = [
        FlameFilter(noise=0.5).apply(sent, ReductionContext(State(w=torch.zeros_like(row)), round=k))[0].w - row
        for k in (1, 1, 2)
    ]
    assert drawn[0].std().item() == pytest.approx(0.5, rel=0.01)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def smallest_majority(distances: np.ndarray) -> list[int]:
    """The first majority of a single-linkage tree, by joining components at every distance that occurs."""
    n = len(distances)
    for threshold in np.unique(distances[np.triu_indices(n, 1)].round(9)):
        linked = distances.round(9) <= threshold
        reach = np.linalg.matrix_power((linked | np.eye(n, dtype=bool)).astype(int), n) > 0
        for row in reach:
            if row.sum() > n // 2:
                return np.flatnonzero(row).tolist()
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_the_majority_that_forms_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 6, size=(int(rng.integers(2, 9)), 2)).astype(float)  # with ties
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    assert majority_cluster(torch.from_numpy(distances)) == smallest_majority(distances)


CORNERS = matrix((0, 0), (1, 0), (0, 1), (10, 10))


def test_weiszfeld_steps_of_rfa() -> None:
    for steps, expected in enumerate((1.3241696652, 0.7435841867, 0.5700945035, 0.5223976248), 1):
        close(reduced(RFA(iterations=steps, tolerance=0), CORNERS), expected, expected)
    heavy = reduced(RFA(iterations=50, tolerance=0), CORNERS, [0.1, 0.1, 0.1, 0.7])
    close(heavy, 10, 10, to=1e-6)
    limit = RFA(iterations=1000, weighted=False, tolerance=0)
    torch.testing.assert_close(
        reduced(limit, CORNERS, [0.1, 0.1, 0.1, 0.7]), reduced(GeometricMedian(), CORNERS), rtol=0, atol=1e-8
    )


def test_the_objective_of_rfa_never_rises() -> None:
    rows, alpha = normal(7), torch.arange(1.0, 8.0).double()
    points = [reduced(RFA(iterations=k, tolerance=0), rows, alpha.tolist()) for k in range(1, 12)]
    values = [float(alpha @ (rows - v).norm(dim=1)) for v in points]
    assert all(later <= before + 1e-12 for before, later in pairwise(values))


def crfl(rule: CRFL, w: Tensor, round: int, rounds: int = 1000) -> Tensor:
    sent = RoundUploads((0, 1, 2), tuple(Upload(State(w=w)) for _ in range(3)))
    context = ReductionContext(State(w=torch.zeros_like(w)), round=round, rounds=rounds, models=("w",))
    return rule.apply(sent, context)[0].w


def test_clipping_and_noise_of_crfl() -> None:
    w = torch.tensor([0.0, 60.0, 80.0]).double()
    for round, rho in ((1, 2.1), (10, 3), (130, 15), (200, 15)):
        assert crfl(CRFL(sigma=0.0), w, round).norm().item() == pytest.approx(rho)
    torch.testing.assert_close(crfl(CRFL(sigma=0.0), w * 0.06, 10), w * 0.03)
    assert torch.equal(crfl(CRFL(rule=Median(), sigma=0.0, rho_start=1e6, rho_most=1e6), w, 1), w)
    long = torch.zeros(100_000).double()
    assert crfl(CRFL(sigma=0.25), long, 3).std().item() == pytest.approx(0.25, rel=0.02)
    assert torch.equal(crfl(CRFL(sigma=0.25), long, 7, rounds=7), long)  # none after the last round


def test_crfl_names_its_rule_in_its_table() -> None:
    table = CRFL(rule={"name": "trimmed-mean", "trim": 0.3}).table()
    assert table["rule"] == {"name": "trimmed-mean", "trim": 0.3}
    assert CRFL(**table) == CRFL(rule={"name": "trimmed-mean", "trim": 0.3})
    assert "before" not in Mean().table()
