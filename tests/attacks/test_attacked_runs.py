"""Runs under attack: controls, memory of attackers, lies about weights, and the success of backdoors in both modes."""

from pathlib import Path

import pytest
import torch

from equipoise.algorithms import Ditto, FedAvg, Flame
from equipoise.attacks import (
    Attack,
    Backdoor,
    Control,
    FreeRider,
    LabelFlip,
    Mimic,
    Scaling,
    SignFlip,
    WeightInflation,
)
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.reducers import Mean, Median
from tests.support.problems import classification, image_module, images, simulation

OPTIONS = {"participation": 1.0, "rounds": 2}


def attacked(attack: Attack | None, algorithm=None, reducer=None, **options) -> Simulation:
    uploads = UploadSettings(attack, *([] if reducer is None else [reducer]))
    run = simulation(algorithm or FedAvg(lr=0.05, batch=4), uploads=uploads, **{**OPTIONS, **options})
    run.run()
    return run


def test_a_control_is_an_honest_run_scored_on_the_benign() -> None:
    control, honest, under = attacked(Control(fraction=0.34)), attacked(None), attacked(SignFlip(fraction=0.34))
    assert torch.equal(control.server.w, honest.server.w)
    assert control.pipeline.malicious == under.pipeline.malicious
    assert control.summary()["malicious"] == sorted(control.pipeline.malicious)
    assert control.summary()["global"] != honest.summary()["global"]


HARMLESS = [Scaling(fraction=0.34, factor=1), Backdoor(fraction=0.34, part=0), SignFlip(fraction=0)]


@pytest.mark.parametrize("attack", HARMLESS)
def test_who_does_nothing_is_honest(attack: Attack) -> None:
    more = {"federation": images(), "module": image_module()}
    assert torch.equal(attacked(attack, **more).server.w, attacked(None, **more).server.w)


@pytest.mark.parametrize("reducer", [Mean(), Median()])
def test_rules_without_weights_do_not_care_what_is_claimed(reducer) -> None:
    liars = attacked(WeightInflation(fraction=0.34), reducer=reducer)
    assert torch.equal(liars.server.w, attacked(None, reducer=reducer).server.w)


def test_a_weighted_mean_is_who_claims_most() -> None:
    alone = attacked(WeightInflation(clients=("client-3",), factor=1e12), rounds=1)
    seen = []

    class Watching(FedAvg):
        def aggregate(self, server, uploads, reduce):
            seen.append(uploads.uploads[3].message.w)
            return super().aggregate(server, uploads, reduce)

    attacked(None, Watching(lr=0.05, batch=4), rounds=1)
    torch.testing.assert_close(alone.server.w, seen[0])


def test_attacks_that_could_do_nothing_are_refused() -> None:
    with pytest.raises(EquipoiseError, match="clients of Flame send none"):
        attacked(WeightInflation(), Flame())


class NoOrigin(FedAvg):
    def origin(self, server):
        return None


def test_attacks_on_differences_need_an_origin() -> None:
    with pytest.raises(EquipoiseError, match="messages of NoOrigin are not changes"):
        attacked(Scaling(), NoOrigin())


def test_messages_are_relative_to_the_origin() -> None:
    """All of the attackers' progress, reversed: the mean of two is where it was."""
    run = attacked(Scaling(clients=("client-0",), factor=0), rounds=1, federation=classification(2), reducer=Mean())
    w0, half = run.task.w0, attacked(None, rounds=1, federation=classification(2), reducer=Mean())
    assert torch.equal(w0, simulation(FedAvg(lr=0.05, batch=4)).task.w0)
    assert (run.server.w - w0).norm() < (half.server.w - w0).norm() * 2
    free = attacked(
        FreeRider(clients=("client-0",), disguise="none"), rounds=1, federation=classification(2), reducer=Mean()
    )
    torch.testing.assert_close(run.server.w, free.server.w)


@pytest.mark.parametrize("attack", [FreeRider(fraction=0.34), Mimic(fraction=0.34, choose="extreme")])
def test_what_attackers_remember_survives(attack: Attack, tmp_path: Path) -> None:
    options = {"rounds": 4, "checkpoint_every": 2, "uploads": UploadSettings(attack), "participation": 0.5}
    whole = simulation(FedAvg(lr=0.05, batch=4), folder=tmp_path / "whole", **options)
    whole.run()
    cut = simulation(FedAvg(lr=0.05, batch=4), folder=tmp_path / "cut", **options)
    for _ in range(3):  # the third is not saved
        cut.advance()
    cut.close()
    again = simulation(FedAvg(lr=0.05, batch=4), folder=tmp_path / "cut", new=False, **options)
    again.resume()
    assert again.done == 2
    assert again.pipeline.adversary.memory
    again.run()
    assert torch.equal(again.server.w, whole.server.w)


def test_the_success_of_a_backdoor_is_that_of_the_models() -> None:
    attack, found = Backdoor(fraction=0.34, target=1), []
    for mode in ("threads", "stacked"):
        run = attacked(attack, Ditto(lr=0.1, batch=4), mode=mode, federation=images(), module=image_module())
        found.append({kind: run.summary()[kind] for kind in ("personal", "global", "hybrid")})
        assert run.lines[-1]["global"]["attack_success"] == found[-1]["global"]["attack_success"]
    summary = run.summary()
    assert summary["attack_measure"]["target"] == 1
    assert found[0]["global"]["attack_success"] == pytest.approx(found[1]["global"]["attack_success"])
    hits = samples = 0
    for who, name in enumerate(run.federation.names):
        if name not in run.pipeline.malicious:
            rows = torch.from_numpy(run.federation.test[who])
            x, y = run.federation.gather(rows)
            x, y = attack.marked(x[y != 1], (0.0, 1.0), attack.pixels), y[y != 1]
            hits += int((run.task.to_module(run.server.w)(x).argmax(1) == 1).sum())
            samples += len(y)
    assert summary["global"]["attack_success"] == pytest.approx(hits / samples)
    assert 0 <= summary["personal"]["attack_unmarked"] <= 1


def test_the_success_of_an_attack_is_kept_with_the_scores(tmp_path: Path) -> None:
    uploads = UploadSettings(LabelFlip(fraction=0.34, mode="targeted", source=0, target=2))
    run = simulation(FedAvg(lr=0.05, batch=4), folder=tmp_path / "run", uploads=uploads, **OPTIONS)
    run.run()
    again = simulation(FedAvg(lr=0.05, batch=4), folder=tmp_path / "run", uploads=uploads, new=False, **OPTIONS)
    again.resume()
    assert again.summary()["global"] == run.summary()["global"]
    assert "attack_unmarked" not in run.summary()["global"]
    again.close()
