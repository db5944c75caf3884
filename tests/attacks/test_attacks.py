"""Malicious clients: who they are, what they send, what they train on, and that they count in no score."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.algorithms import FedAvg, Flame, Local
from equipoise.algorithms.base import Algorithm
from equipoise.attacks import ATTACKS, Attack, AttackContext, Gaussian, LabelPoison, SameValue, SignFlip, poison_samples
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.reducers import Median
from equipoise.state import State
from tests.support.problems import LeastSquares, classification, image_module, images, linear_module, simulation


def attacked(algorithm: Algorithm, attack: Attack | None, **options) -> Simulation:
    run = simulation(algorithm, uploads=UploadSettings(attack), **options)
    run.run()
    return run


@given(st.integers(2, 60), st.floats(0, 0.99), st.integers(0, 1000))
@settings(max_examples=60)
def test_a_fraction_of_the_clients_is_malicious_whatever_their_order(m: int, fraction: float, seed: int) -> None:
    names = [f"c{i}" for i in range(m)]
    attack = SignFlip(fraction=fraction)
    if round(fraction * m) == m:
        with pytest.raises(EquipoiseError, match="all clients are malicious"):
            attack.malicious(names, seed)
        return
    chosen = attack.malicious(names, seed)
    assert len(chosen) == round(fraction * m)
    assert SignFlip(fraction=fraction / 2).malicious(names, seed) <= chosen
    assert chosen == attack.malicious(names[::-1], seed)


def test_malicious_clients_may_be_named_and_must_exist() -> None:
    assert SignFlip(clients=("b",)).malicious(["a", "b"], 0) == {"b"}
    with pytest.raises(EquipoiseError, match="'z', which is not one of the 2 clients"):
        SignFlip(clients=("z",)).malicious(["a", "b"], 0)


def message(attack: Attack, own: State, draws: int) -> list[torch.Tensor]:
    return [attack.message(own, torch.Generator().manual_seed(k)).u for k in range(draws)]


def test_what_each_attack_sends() -> None:
    own = State(u=torch.linspace(-2, 3, 2000).double())
    same = torch.stack(message(SameValue(variance=0.25), own, 400))
    assert (same == same[:, :1]).all()
    assert same[:, 0].var().item() == pytest.approx(0.25, rel=0.2)
    flipped = torch.stack(message(SignFlip(variance=0.25), own, 400))
    factors = flipped[:, -1] / own.u[-1]
    assert (factors <= 0).all()
    torch.testing.assert_close(flipped, factors[:, None] * own.u)
    assert factors.square().mean().item() == pytest.approx(0.25, rel=0.2)
    noise = torch.stack(message(Gaussian(variance=0.25), own, 3))
    assert noise.var().item() == pytest.approx(0.25, rel=0.1)
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("classes", [2, 7])
def test_poisoned_labels_are_drawn_once_and_only_for_training(classes: int) -> None:
    federation = classification()
    from dataclasses import replace

    federation = replace(federation, classes=classes, y=federation.y % classes)
    bad = {federation.names[5]: 0}
    first, second = (poison_samples(federation, LabelPoison(), bad, seed=3) for _ in range(2))
    assert torch.equal(first.y, second.y)
    rows = torch.from_numpy(federation.train[5])
    others = torch.ones(len(federation.y), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(first.y[others], federation.y[others])
    if classes == 2:
        assert torch.equal(first.y[rows], 1 - federation.y[rows])
    else:
        assert not torch.equal(first.y[rows], federation.y[rows])
        assert first.y[rows].min() >= 0
        assert first.y[rows].max() < classes


def test_numbers_have_no_labels_to_poison(problem: LeastSquares) -> None:
    with pytest.raises(EquipoiseError, match="targets of these data are numbers"):
        simulation(
            FedAvg(),
            problem.federation(),
            linear_module(),
            loss="squared",
            uploads=UploadSettings(LabelPoison(fraction=0.5)),
        )


def test_every_algorithm_can_be_attacked(algorithm: Algorithm) -> None:
    under, honest = (
        attacked(algorithm, attack, rounds=1, participation=1.0) for attack in (SignFlip(fraction=0.34), None)
    )
    assert len(under.pipeline.malicious) == 2
    if under.schema.up:
        assert any(not torch.equal(t, honest.server[field]) for field, t in under.server.items())


@pytest.mark.slow
def test_an_attack_is_the_same_stacked_or_not(one_of_a_kind: Algorithm) -> None:
    same_under_attack(one_of_a_kind, SignFlip(fraction=0.34))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ATTACKS))
def test_every_attack_works_stacked_or_not(name: str) -> None:
    attack = ATTACKS[name](fraction=0.34)
    algorithm = FedAvg if attack.needs_weights else Flame
    same_under_attack(algorithm(lr=0.05, epochs=2, batch=4), attack, federation=images(), module=image_module())


def same_under_attack(algorithm: Algorithm, attack: Attack, **options) -> None:
    options |= {"rounds": 2, "participation": 1.0}
    runs = [attacked(algorithm, attack, mode=mode, **options) for mode in ("threads", "stacked")]
    assert len(runs[0].pipeline.malicious) == 2
    assert runs[0].pipeline.malicious == runs[1].pipeline.malicious
    for field, t in runs[0].server.items():
        torch.testing.assert_close(t, runs[1].server[field], rtol=1e-7, atol=1e-9)


def test_the_server_hears_the_attack_and_the_client_keeps_its_own_work() -> None:
    """With the mean of six clients, two of which send one number everywhere, and nothing else changed."""
    algorithm = FedAvg(lr=0.05, batch=4)
    attack = SameValue(fraction=0.34, variance=4.0)
    run = simulation(algorithm, rounds=1, participation=1.0, uploads=UploadSettings(attack))
    honest = simulation(algorithm, rounds=1, participation=1.0)
    seen = {}
    for each in (run, honest):
        aggregate = type(algorithm).aggregate

        def watching(self, server, uploads, reduce, each=each, aggregate=aggregate):
            seen[each] = uploads
            return aggregate(self, server, uploads, reduce)

        each.pipeline.algorithm = type("Watching", (FedAvg,), {"aggregate": watching})(lr=0.05, batch=4)
        each.advance()
        each.close()
    for who, forged, own in zip(seen[run].who, seen[run].uploads, seen[honest].uploads, strict=True):
        if run.federation.names[who] in run.pipeline.malicious:
            assert (forged.message.w == forged.message.w[0]).all()
        else:
            assert torch.equal(forged.message.w, own.message.w)
        assert torch.equal(forged.weight, own.weight)


def test_flames_server_remembers_what_attackers_sent() -> None:
    run = simulation(
        Flame(lr=0.05, batch=4), rounds=3, participation=1.0, uploads=UploadSettings(SameValue(fraction=0.34))
    )
    run.run()
    sent = torch.stack([run.store.get(i)["sent.u"] for i in range(6)])
    torch.testing.assert_close(run.server.w, sent.mean(0))
    for i in range(6):
        state = run.store.get(i)
        bad = run.federation.names[i] in run.pipeline.malicious
        assert bad == bool((sent[i] == sent[i, 0]).all())
        torch.testing.assert_close(state.pi, 1.0 / 6 * (state.theta - state.w_i))  # Lemma 3 holds for them too


class Opposite(Attack):
    """An attacker that knows all: it sends minus the mean of the benign."""

    def messages(self, scene: AttackContext) -> list[State]:
        mean = {name: torch.stack([m[name] for m in scene.benign]).mean(0) for name in scene.own[0]}
        return [State({name: -t for name, t in mean.items()}) for _ in scene.names]


def test_an_omniscient_attacker_uses_the_same_interface() -> None:
    run = attacked(FedAvg(lr=0.05, batch=4), Opposite(fraction=0.5), rounds=1, participation=1.0)
    honest = attacked(FedAvg(lr=0.05, batch=4), None, rounds=1, participation=1.0)
    assert run.server.w.norm() < honest.server.w.norm()


class Broken(Attack):
    def message(self, own: State, rng: torch.Generator) -> State:
        return State({name: t * torch.nan for name, t in own.items()})


def test_a_message_that_nobody_would_take_is_not_sent() -> None:
    run = attacked(FedAvg(lr=0.05, batch=4), Broken(fraction=0.5), rounds=2)
    assert run.server.finite()


def test_scores_are_those_of_the_benign_and_the_malicious_are_listed(tmp_path: Path) -> None:
    run = simulation(
        Flame(lr=0.05, batch=4), folder=tmp_path / "run", rounds=2, uploads=UploadSettings(SignFlip(fraction=0.34))
    )
    run.run()
    summary = run.summary()
    assert summary["malicious"] == sorted(run.pipeline.malicious)
    tables = run.scores.tables()
    names = run.federation.names
    for kind in ("personal", "global"):
        counted = [tables[kind][i, 3] for i in range(6) if names[i] not in run.pipeline.malicious]
        assert summary[kind]["accuracy"] == pytest.approx(np.mean(counted))
    with (tmp_path / "run" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["client"] for row in rows if row["malicious"] == "true"} == run.pipeline.malicious
    assert len(rows) == 6


def test_without_an_attack_nothing_is_said_of_one() -> None:
    run = attacked(Local(lr=0.05, batch=4), None)
    assert "malicious" not in run.summary()


def test_an_attacked_run_goes_on_where_it_was(tmp_path: Path) -> None:
    uploads = UploadSettings(Gaussian(fraction=0.34), Median())
    whole = simulation(Flame(lr=0.05, batch=4), rounds=6, folder=tmp_path / "whole", uploads=uploads)
    whole.run()
    options = {"checkpoint_every": 3, "folder": tmp_path / "cut", "uploads": uploads}
    cut = simulation(Flame(lr=0.05, batch=4), rounds=6, **options)
    for _ in range(4):  # the fourth is not saved
        cut.advance()
    cut.close()
    again = simulation(Flame(lr=0.05, batch=4), rounds=6, new=False, **options)
    again.resume()
    assert again.done == 3
    again.run()
    assert torch.equal(again.server.w, whole.server.w)
    for i in range(6):
        for name, t in whole.store.get(i).items():
            assert torch.equal(t, again.store.get(i)[name])
