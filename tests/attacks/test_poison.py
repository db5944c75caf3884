"""Poisoned samples: which ones change, into what, and how the success of an attack is counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from equipoise.attacks import (
    Backdoor,
    Control,
    DistributedBackdoor,
    EdgeCase,
    LabelFlip,
    PoisonContext,
    TriggeredSamples,
)
from equipoise.attacks import SuccessMeasure as Measure
from equipoise.attacks.backdoor import BARS
from equipoise.attacks.base import Attack
from equipoise.attacks.poison import poison_samples, prepared_attack
from equipoise.data.federation import Federation, from_clients
from equipoise.errors import EquipoiseError
from equipoise.evaluation.attack_success import SuccessCounter, success_figures
from tests.support.problems import images

NORMALIZE = (0.1307, 0.3081)


def facts(classes: int | None = 10, index: int = 0, seed: int = 0) -> PoisonContext:
    return PoisonContext(classes, torch.Generator().manual_seed(seed), index)


def flipped(attack: Attack, y: torch.Tensor, classes: int = 10) -> torch.Tensor:
    return attack.samples(y.double()[:, None], y, facts(classes))[1]


def test_labels_are_flipped_by_a_rule() -> None:
    y = torch.arange(10)
    assert flipped(LabelFlip(), y).tolist() == list(range(9, -1, -1))
    assert torch.equal(flipped(LabelFlip(), flipped(LabelFlip(), y)), y)
    assert flipped(LabelFlip(mode="next"), y).tolist() == [*range(1, 10), 0]
    assert flipped(LabelFlip(mode="targeted", source=5, target=1), y).tolist() == [0, 1, 2, 3, 4, 1, 6, 7, 8, 9]
    two = torch.tensor([0, 1, 1])
    for mode in ("inverse", "next", "random"):
        assert flipped(LabelFlip(mode=mode), two, 2).tolist() == [1, 0, 0]


def test_random_labels_are_never_the_true_one() -> None:
    y = torch.full((9000,), 3)
    counts = np.bincount(flipped(LabelFlip(mode="random"), y).numpy(), minlength=10)
    assert counts[3] == 0
    assert (np.abs(np.delete(counts, 3) - 1000) < 3 * np.sqrt(9000 * 8 / 81)).all()


def test_part_of_the_labels_are_flipped() -> None:
    y = torch.tensor([0, 1] * 50)
    found = flipped(LabelFlip(mode="targeted", source=0, target=7, part=0.3), y)
    assert (found == 7).sum() == 15
    assert torch.equal(found[1::2], y[1::2])
    assert torch.equal(flipped(LabelFlip(part=0), y), y)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mode": "targeted"}, "needs attack.source and attack.target"),
        ({"source": 1, "target": 2}, "has no source and target"),
        ({"mode": "targeted", "source": 1, "target": 1}, "must differ"),
    ],
)
def test_a_flip_names_both_labels_or_none(settings: dict, why: str) -> None:
    with pytest.raises(EquipoiseError, match=why):
        LabelFlip(**settings)


def test_numbers_are_no_labels() -> None:
    for attack in (LabelFlip(), Backdoor()):
        with pytest.raises(EquipoiseError, match="targets of these data are numbers"):
            attack.samples(torch.zeros(2, 1, 4, 10), torch.zeros(2), facts(None))


def test_the_mark_is_sixteen_pixels_on_the_scale_of_the_inputs() -> None:
    x = torch.rand(3, 2, 28, 28, dtype=torch.float64) / 2
    marked = Backdoor().marked(x, (0.0, 1.0), BARS)
    changed = (marked != x).all(dim=(0, 1))
    assert {tuple(pixel) for pixel in changed.nonzero().tolist()} == set(BARS)
    assert (marked != x).sum() == 3 * 2 * 16
    assert torch.equal(Backdoor().marked(marked, (0.0, 1.0), BARS), marked)
    stored = Backdoor().marked(x, NORMALIZE, BARS)
    assert stored[0, 0, 0, 0].item() == pytest.approx(2.8214865304, abs=1e-9)
    with pytest.raises(EquipoiseError, match="5 rows and 5 columns"):
        Backdoor().marked(x[:, :, :5, :5], NORMALIZE, BARS)
    with pytest.raises(EquipoiseError, match="needs images"):
        Backdoor().marked(x.flatten(1), NORMALIZE, BARS)


@pytest.mark.parametrize("channels_last", [False, True])
def test_part_of_the_training_images_are_marked(channels_last: bool) -> None:
    federation = images(normalize=NORMALIZE).prepared(torch.float32, channels_last)
    name = federation.names[4]
    poisoned = poison_samples(federation, Backdoor(part=0.5, target=1), {name: 0}, 0)
    rows = torch.from_numpy(federation.train[4])
    before, after = federation.inputs(rows), poisoned.inputs(rows)
    changed = (before != after).flatten(1).any(1)
    assert changed.sum() == round(0.5 * len(rows))
    assert torch.equal(after[changed], Backdoor().marked(before[changed], NORMALIZE, BARS))
    assert (poisoned.y[rows][changed] == 1).all()
    assert torch.equal(poisoned.y[rows][~changed], federation.y[rows][~changed])
    others = torch.ones(len(federation.y), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(poisoned.x[others], federation.x[others])
    assert torch.equal(poisoned.y[others], federation.y[others])
    honest = poison_samples(federation, Backdoor(part=0), {name: 0}, 0)
    assert honest.x is federation.x
    assert torch.equal(honest.y, federation.y)


def test_pixels_as_bytes_are_marked_as_numbers_are() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, size=(1400, 1, 28, 28)).astype(np.float32) / np.float32(255)
    federation = from_clients([(x, rng.integers(3, size=1400))]).prepared(torch.float32, False)
    assert federation.pixels is not None
    poisoned = poison_samples(federation, Backdoor(), {federation.names[0]: 0}, 0)
    plain = poison_samples(federation.unpacked, Backdoor(), {federation.names[0]: 0}, 0)
    assert poisoned.pixels is not None  # 1 is a pixel, too
    assert torch.equal(poisoned.inputs(torch.arange(1400)), plain.unpacked.x)


def test_a_distributed_mark_is_whole_when_all_attackers_are_taken_together() -> None:
    parts = [DistributedBackdoor().pixels_of(k) for k in range(6)]
    assert [len(part) for part in parts] == [4] * 6
    assert [pixel for part in parts[:4] for pixel in part] == list(BARS)  # disjoint, and all of it
    assert parts[4:] == parts[:2]
    whole, one = DistributedBackdoor().success(), Backdoor().success()
    assert whole is not None and one is not None  # noqa: PT018
    assert whole.facts() == one.facts()
    x, y = torch.rand(20, 1, 4, 10), torch.zeros(20, dtype=torch.int64)
    for own, other in zip(
        DistributedBackdoor(parts=1).samples(x, y, facts()), Backdoor().samples(x, y, facts()), strict=True
    ):
        assert torch.equal(own, other)


def counted(labels: list[int], predicted: list[int], measure: Measure) -> dict:
    """Of a client whose inputs are what the model predicts."""
    x, y = np.eye(3)[predicted], np.array(labels)
    federation = replace(from_clients([{"train": (x[:1], y[:1]), "test": (x, y)}]), classes=3)
    samples = TriggeredSamples(federation, measure)
    task = type("Task", (), {"device": torch.device("cpu"), "predict": staticmethod(lambda module, x: module(x))})
    counter = SuccessCounter(samples, task)  # type: ignore[arg-type]
    return success_figures(counter.count(0, lambda x: x)[None], measure.marks)


def test_samples_of_the_target_class_do_not_count() -> None:
    found = counted([0, 1, 1, 2, 2], [0, 0, 2, 0, 1], Measure(0))
    assert found["attack_success"] == 0.5
    assert found["attack_right"] == 0
    marked = counted([0, 1, 1, 2, 2], [0, 0, 2, 0, 1], Measure(0, trigger=lambda x, _: x.roll(1, 1)))
    assert marked == {"attack_success": 0.25, "attack_right": 0.5, "attack_unmarked": 0.5}


def test_of_a_targeted_flip_only_the_source_counts() -> None:
    found = counted([0, 1, 1, 2, 2], [0, 0, 1, 0, 1], Measure(0, source=1))
    assert found == {"attack_success": 0.5, "attack_right": 0.5}  # the latter is the recall of the source


def test_nothing_to_count_is_no_rate() -> None:
    assert counted([0, 0], [1, 2], Measure(0)) == {"attack_success": None, "attack_right": None}


def test_labels_must_exist() -> None:
    federation: Federation = images()
    with pytest.raises(EquipoiseError, match=r"attack\.target = 7 is not a label"):
        TriggeredSamples(federation, Measure(7))


def test_a_control_is_measured_as_what_it_controls() -> None:
    control = Control(of={"name": "backdoor", "target": 1})
    assert control.table()["of"]["name"] == "backdoor"
    assert Control(**control.table()) == control
    measure = control.success()
    assert measure is not None
    assert measure.facts() == Backdoor(target=1).success().facts()  # type: ignore[union-attr]
    assert Control().success() is None


@pytest.mark.parametrize("tail", [0.0, 0.25, 1.0])
def test_the_tail_of_a_class_gets_another_label(tail: float) -> None:
    federation = images()
    names = {federation.names[k]: place for place, k in enumerate((1, 4))}
    attack = prepared_attack(federation, EdgeCase(source=1, target=2, tail=tail), names)
    poisoned = poison_samples(federation, attack, names, 0)
    rows = np.concatenate([federation.train[1], federation.train[4]])
    rows = rows[federation.y.numpy()[rows] == 1]
    x = federation.x.numpy()[rows].reshape(len(rows), -1).astype(np.float64)
    far = np.argsort(-np.linalg.norm(x - x.mean(0), axis=1))[: round(tail * len(rows))]
    changed = np.flatnonzero((poisoned.y != federation.y).numpy())
    assert set(changed) == set(rows[far])
    assert (poisoned.y.numpy()[changed] == 2).all()
    flip = poison_samples(federation, LabelFlip(mode="targeted", source=1, target=2), names, 0)
    assert torch.equal(poisoned.y, flip.y) == (tail == 1)
    measure = attack.success()
    assert measure is not None
    scored = TriggeredSamples(federation, measure).rows.flat
    assert len(scored) == 0 if tail == 0 else (federation.y.numpy()[scored] == 1).all()
