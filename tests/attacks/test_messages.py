"""What attackers send, against numbers and identities worked out by hand."""

from math import sqrt

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.attacks import (
    ALIE,
    ATTACKS,
    IPM,
    Attack,
    AttackContext,
    FangKrum,
    FangTrimmed,
    FreeRider,
    Mimic,
    MinMax,
    MinSum,
    Scaling,
    WeightInflation,
)
from equipoise.attacks.alie import largest_z
from equipoise.errors import EquipoiseError
from equipoise.reducers import Krum, Mean, Median, WeightedMean
from equipoise.state import RoundUploads, State, Upload

SQUARE = [[1.0, 0.0], [3.0, 0.0], [2.0, 3.0]]


def messages(rows: object) -> tuple[State, ...]:
    found = torch.as_tensor(np.array(rows, dtype=np.float64))
    return tuple(State(w=row.reshape(-1)) for row in found)


def context(benign: object, own: object = ((0.0, 0.0),), origin: object = None, **more: object) -> AttackContext:
    theirs, mine = messages(benign), messages(own)
    names = tuple(f"bad-{k}" for k in range(len(mine)))
    start = State(w=torch.zeros_like(mine[0].w)) if origin is None else messages([origin])[0]
    facts = {"round": 1, "seed": 0, "origin": start, "benign_names": tuple(f"good-{k}" for k in range(len(theirs)))}
    return AttackContext(names=names, own=mine, benign=theirs, server=start, **{**facts, **more})  # type: ignore[arg-type]


def sent(attack: Attack, scene: AttackContext) -> Tensor:
    return torch.stack([m.w for m in attack.messages(scene)])


def close(found: Tensor, expected: object, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("n", "f", "z"),
    [
        *((25, 6, 0.3360381404), (50, 12, 0.3360381404), (50, 10, 0.2533471031), (24, 6, 0.2822161471)),
        *((25, 12, 1.4260768723), (10, 2, 0.0), (10, 1, 0.0), (4, 3, 1.5)),
    ],
)
def test_a_little_is_how_much(n: int, f: int, z: float) -> None:
    assert largest_z(n, f) == pytest.approx(z, abs=1e-9)


def test_a_little_is_enough() -> None:
    close(sent(ALIE(z=0.5), context(SQUARE)), [[1.5, 0.1339745962]])
    close(sent(ALIE(z=0.5, direction="plus"), context(SQUARE)), [[2.5, 1 + 0.5 * sqrt(3)]])
    rows = np.random.default_rng(0).normal(size=(7, 5))
    one = sent(ALIE(), context(rows, np.zeros((5, 5))))
    close(sent(ALIE(), context(3 * rows + 1, np.zeros((5, 5)))), 3 * one + 1)
    together = np.concatenate([rows, sent(ALIE(z=0), context(rows, np.zeros((5, 5))))])
    np.testing.assert_allclose(together.mean(0), rows.mean(0))
    assert "majority" in ALIE().notes(4, 3)[0]
    assert "z = 0" in ALIE().notes(10, 1)[0]
    assert ALIE().notes(25, 6) == ALIE(z=1).notes(10, 1) == []


def test_attackers_that_know_only_their_own_need_two() -> None:
    scene = context(SQUARE, [[1.0, 0.0], [3.0, 2.0]])
    close(sent(ALIE(z=1.0, knowledge="own"), scene), [[2 - sqrt(2), 1 - sqrt(2)]] * 2)
    alone = context(SQUARE, [[1.0, 7.0]])
    for attack in (ALIE(knowledge="own"), MinMax(knowledge="own"), FangTrimmed(knowledge="own")):
        close(sent(attack, alone), [[1.0, 7.0]])


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 4.0])
def test_inner_products_are_manipulated(epsilon: float) -> None:
    rng = np.random.default_rng(1)
    benign, origin = rng.normal(size=(19, 4)), rng.normal(size=4)
    forged = sent(IPM(epsilon=epsilon), context(benign, np.zeros((6, 4)), origin))
    mean = benign.mean(0) - origin
    everyone = np.concatenate([benign, forged]).mean(0) - origin
    np.testing.assert_allclose(everyone, (19 - 6 * epsilon) / 25 * mean)
    assert (mean @ (forged[0].numpy() - origin)) == pytest.approx(-epsilon * mean @ mean)
    turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    turned = sent(IPM(epsilon=epsilon), context(benign @ turn, np.zeros((6, 4)), origin @ turn))
    np.testing.assert_allclose(turned, forged.numpy() @ turn)


def test_no_manipulation_sends_the_origin() -> None:
    close(sent(IPM(epsilon=0), context(SQUARE, origin=[5.0, 6.0])), [[5.0, 6.0]])


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (MinMax(direction="unit"), [0.4676192421, 0.2338096210]),
        (MinMax(direction="sign"), [1.0, 0.0]),
        (MinMax(), [1.3660254038, -0.0980762114]),
        (MinSum(direction="unit"), [0.7350889359, 0.3675444680]),
        (MinSum(), [1.2928932188, -0.2247448714]),
    ],
)
def test_as_far_as_benign_messages(attack: Attack, expected: list[float]) -> None:
    close(sent(attack, context(SQUARE)), [expected])


@pytest.mark.parametrize(("attack", "expected"), [(MinMax, 0.0), (MinSum, 1.5)])
def test_as_far_on_a_line(attack: type[MinMax], expected: float) -> None:
    found = sent(attack(direction="unit"), context([[0.0], [1.0], [2.0], [4.0]], [[0.0]]))
    close(found, [[expected]])


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
def test_conditions_hold_with_equality(direction: str) -> None:
    rng = np.random.default_rng(2)
    benign, origin = rng.normal(size=(9, 12)), rng.normal(size=12)
    apart = ((benign[:, None] - benign) ** 2).sum(-1)
    scene = context(benign, np.zeros((2, 12)), origin)
    far = ((sent(MinMax(direction=direction), scene)[0].numpy() - benign) ** 2).sum(-1)
    assert far.max() == pytest.approx(apart.max(), rel=1e-9)
    far = ((sent(MinSum(direction=direction), scene)[0].numpy() - benign) ** 2).sum(-1)
    assert far.sum() == pytest.approx(apart.sum(1).min(), rel=1e-9)


def test_equal_messages_leave_no_room() -> None:
    for attack in (MinMax(), MinSum(), MinMax(direction="sign"), Mimic(), ALIE(z=3)):
        close(sent(attack, context([[1.0, 2.0]] * 3)), [[1.0, 2.0]])


def test_the_search_against_krum_on_a_line() -> None:
    scene = context([[-2.0], [-1.0], [0.5], [2.0], [4.5]], [[0.0], [0.0]])
    close(sent(FangKrum(), scene), [[-1.8125], [-1.8125]])


def test_krum_chooses_what_was_made_for_it() -> None:
    benign = [[3, 1, 0, 0], [1, -2, 2, 0], [0, 1, -2, 3], [1, 2, 1, -2], [-1, 0, 1, 2]]
    scene = context(benign, np.zeros((2, 4)))
    forged = sent(FangKrum(), scene)
    close(forged[0], [-1.2027114640 * s for s in (1, 1, 1, 1)])
    uploads = RoundUploads(tuple(range(7)), tuple(Upload(m) for m in (*scene.benign, *FangKrum().messages(scene))))
    close(Krum(malicious=2 / 7)(uploads).w, forged[0])


def test_too_few_for_krum_are_honest() -> None:
    scene = context(SQUARE, [[1.0, 2.0], [3.0, 4.0]])
    close(sent(FangKrum(), scene), [[1.0, 2.0], [3.0, 4.0]])


def test_against_krum_with_own_messages_only() -> None:
    rng = np.random.default_rng(3)
    scene = context(rng.normal(size=(19, 6)) + 1, rng.normal(size=(6, 6)) + 1)
    forged = sent(FangKrum(knowledge="own"), scene)
    sign = -torch.stack([m.w for m in scene.own]).mean(0).sign()
    close(forged / sign, (forged[0] / sign).expand_as(forged))
    assert (forged[0] / sign)[0] >= 1e-5


@pytest.mark.parametrize(
    ("benign", "low", "high"),
    [((0.2, 0.5, 0.8), 0.1, 0.2), ((-0.4, 0.5, 0.8), -0.8, -0.4), ((-0.5, -0.2), -0.2, -0.1), ((-0.9, 0.1), 0.1, 0.2)],
)
def test_beyond_all_benign_values(benign: tuple[float, ...], low: float, high: float) -> None:
    rows = np.repeat(np.array(benign)[:, None], 300, axis=1)
    forged = sent(FangTrimmed(), context(rows, np.zeros((2, 300))))
    assert low <= forged.min() < low + 0.05 * (high - low)
    assert high - 0.05 * (high - low) < forged.max() <= high
    assert not torch.equal(forged[0], forged[1])
    edge = low if low in benign else high
    close(sent(FangTrimmed(b=1), context(rows, np.zeros((1, 300)))), np.full((1, 300), edge))


def test_a_median_moves_against_the_mean_everywhere() -> None:
    rng = np.random.default_rng(4)
    benign, origin = rng.normal(size=(9, 40)), rng.normal(size=40)
    scene = context(benign, np.zeros((4, 40)), origin)
    uploads = RoundUploads(tuple(range(13)), tuple(Upload(m) for m in (*scene.benign, *FangTrimmed().messages(scene))))
    moved = Median()(uploads).w.numpy() - np.median(benign, axis=0)
    assert (moved * np.sign(benign.mean(0) - origin) < 0).all()


def test_all_are_one_benign_client() -> None:
    extreme = context([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5], [4.0, 0.0]], [[9.0, 9.0]] * 2)
    close(sent(Mimic(choose="extreme"), extreme), [[4.0, 0.0]] * 2)
    fixed = Mimic().messages(extreme)
    assert any(fixed[0] is m for m in extreme.benign)
    assert fixed[0] is fixed[1]


def test_the_extreme_client_is_kept_after_the_warm_up() -> None:
    attack, rows = Mimic(choose="extreme"), np.array([[1.0], [-1.0], [4.0]])
    memory = attack.remember(context(rows, [[0.0]]))
    later = context(rows[::-1].copy(), [[0.0]], round=2, memory=memory)
    assert sent(attack, later).item() == 1.0  # good-2, though another is extreme now
    absent = context(rows[:2], [[0.0]], round=2, memory=memory)
    assert abs(sent(attack, absent).item()) == 1.0


def test_the_model_is_replaced() -> None:
    origin = np.array([1.0, 2.0])
    own = np.tile(origin + np.array([0.5, -1.0]), (6, 1))
    scene = context(np.tile(origin, (19, 1)), own, origin, reducer=Mean())
    forged = sent(Scaling(), scene)
    close(forged, origin + 25 / 6 * np.array([[0.5, -1.0]] * 6))
    np.testing.assert_allclose((19 * origin + forged.sum(0).numpy()) / 25, own[0])
    weights = tuple(torch.tensor([float(w)]) for w in (3, 1, 1, 1, 1, 1))
    more = {"weights": weights, "benign_weights": (torch.ones(1),) * 19, "reducer": WeightedMean()}
    weighted = context(np.tile(origin, (19, 1)), own, origin, **more)
    close(sent(Scaling(), weighted)[0], origin + 27 / 8 * np.array([0.5, -1.0]))


def test_factors_and_bounds_of_a_difference() -> None:
    scene = context(SQUARE, [[4.0, 5.0]], [1.0, 1.0])
    assert Scaling(factor=1).messages(scene)[0] is scene.own[0]
    assert Scaling(from_round=2).messages(scene) is scene.own
    close(sent(Scaling(factor=-1), scene), [[-2.0, -3.0]])
    close(sent(Scaling(factor=2, bound=1), scene), [[1 + 2 * 0.6, 1 + 2 * 0.8]])
    assert Scaling(factor=1, bound=6).messages(scene)[0] is scene.own[0]


def test_weights_are_inflated() -> None:
    scene = context(np.zeros((24, 1)), [[1.0]], weights=(torch.tensor([100.0]),))
    assert WeightInflation(claim=1e6).weights(scene) == [torch.tensor([1e6])]
    assert WeightInflation().weights(scene) == [torch.tensor([1e5])]
    uploads = [Upload(m, weight=torch.tensor([100.0])) for m in scene.benign]
    uploads += [Upload(scene.own[0], weight=WeightInflation(claim=1e6).weights(scene)[0])]
    assert WeightedMean()(RoundUploads(tuple(range(25)), tuple(uploads))).w.item() == pytest.approx(0.9976057462)
    inner = WeightInflation(inner=IPM(epsilon=4))
    close(sent(inner, context([[1.0], [1.0]], [[0.0]])), [[-4.0]])
    assert inner.table()["inner"] == {"name": "ipm", "epsilon": 4.0, "knowledge": "benign"}
    assert WeightInflation(inner={"name": "ipm", "epsilon": 4}) == inner
    with pytest.raises(EquipoiseError, match=r"attack\.inner\.fraction = 0\.5 has no effect; write attack.fraction"):
        WeightInflation(inner={"name": "ipm", "fraction": 0.5})


def test_free_riders_send_what_they_got() -> None:
    plain = FreeRider(disguise="none")
    close(sent(plain, context(SQUARE, [[9.0, 9.0]], [1.0, 2.0])), [[1.0, 2.0]])
    delta = FreeRider(disguise="delta")
    first = context([[0.0]], [[9.0]], [1.5])
    close(sent(delta, first), [[1.5]])
    second = context([[0.0]], [[9.0]], [2.0], round=2, memory=delta.remember(first))
    close(sent(delta, second), [[2.5]])


def test_the_noise_of_free_riders_decays() -> None:
    attack, size = FreeRider(), 200_000
    origins = [np.zeros(size), np.tile([1.0, -3.0], size // 2), np.zeros(size)]
    memory = State()
    for round, origin, deviation in ((1, origins[0], 0.0), (2, origins[1], 2.0), (5, origins[2], 0.5)):
        scene = context([origin], [origin], origin, round=round, memory=memory)
        memory = attack.remember(scene)
        assert np.std(sent(attack, scene)[0].numpy() - origin) == pytest.approx(deviation, rel=0.01)
    assert memory.spread.item() == 2.0


AGAINST = [
    IPM(),
    MinMax(direction="unit"),
    MinMax(direction="sign"),
    MinSum(direction="unit"),
    FangKrum(),
    FangTrimmed(),
]


@pytest.mark.parametrize("attack", AGAINST, ids=lambda a: f"{type(a).__name__}-{getattr(a, 'direction', '')}")
def test_progress_is_lowered_in_any_order_and_block_by_block(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    benign, origin = rng.normal(size=(9, 33)) + 0.3, rng.normal(size=33)
    scene = context(benign, np.zeros((3, 33)), origin)
    forged = sent(attack, scene)
    mean = benign.mean(0) - origin
    before, after = mean @ mean, mean @ (np.concatenate([benign, forged]).mean(0) - origin)
    assert after < before
    close(sent(attack, context(benign[::-1].copy(), np.zeros((3, 33)), origin)), forged)
    monkeypatch.setattr("equipoise.state._BLOCK_BYTES", 8 * 9 * 5)
    close(sent(attack, scene), forged)


def test_fields_without_an_origin_stay_honest() -> None:
    scene = context(SQUARE)
    both = [State(m, loss=torch.tensor([7.0])) for m in (*scene.own, *scene.benign)]
    scene = AttackContext(1, ("a",), tuple(both[:1]), tuple(both[1:]), State(), 0, origin=scene.origin)
    (forged,) = IPM().messages(scene)
    assert forged.loss is both[0].loss
    assert list(forged) == ["w", "loss"]


@pytest.mark.parametrize("name", list(ATTACKS))
def test_shapes_are_kept_and_the_order_of_the_benign_makes_no_difference(name: str) -> None:
    rng = np.random.default_rng(6)

    def message() -> State:
        fields = {"w": rng.normal(size=7), "head": rng.normal(size=(2, 3))}
        return State({k: torch.from_numpy(v).float() for k, v in fields.items()})

    own, benign, origin = [message() for _ in range(3)], [message() for _ in range(8)], message()
    names, ones = [f"good-{k}" for k in range(8)], (torch.ones(1),)
    found = []
    for order in (range(8), rng.permutation(8)):
        scene = AttackContext(
            *(2, ("a", "b", "c"), tuple(own), tuple(benign[k] for k in order), State(origin), 0),
            benign_names=tuple(names[k] for k in order),
            weights=ones * 3,
            benign_weights=ones * 8,
            origin=origin,
            memory=State(w=origin.w + 1, head=origin.head, round=torch.tensor([1])),
        )
        attack = ATTACKS[name]()
        found.append(attack.messages(scene))
        assert [m.shapes() for m in found[-1]] == [m.shapes() for m in own]
        assert all(w.shape == (1,) for w in attack.weights(scene) if w is not None)
    for one, other in zip(*found, strict=True):
        for field, t in one.items():
            torch.testing.assert_close(other[field], t)
