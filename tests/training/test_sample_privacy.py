"""Sample-level privacy: gradients of single samples, clipped and noised, in both executors and for every algorithm."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from torch import Tensor, nn

from equipoise.algorithms import ALGORITHMS, FedAvg, FedAvgFT, FedReCo, Local, PerFedAvg, PFedMe
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import LocalData
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Privacy
from equipoise.privacy.sample_accounting import NoisedStep, SampleReleases
from equipoise.training.data_use import OPERATIONS, DataUse
from equipoise.training.sample_gradients import SampleGradients, clipped_rows
from equipoise.training.sample_privacy import PrivateSteps, SamplePrivacy, check_engine, seeded_source
from tests.support.problems import classification, registered, simulation, small_mlp

SHUFFLED = {"unit": "sample", "batches": "shuffled"}
NOT_COVERED = {
    "knn-per": "a client's samples themselves",
    "learn2pfed": "several exchanges",
    "q-ffl": "loss on all samples",
    "afl": "loss on all samples",
    "term": "loss on all samples",
    "fedala": "batches of a size of their own, or of a part of the samples",
    "fedfomo": "loss on all samples",
    "fedas": "sums over the samples of each class",
    "fedrod": "numbers of samples of each class",
    "fedproto": "sums over the samples of each class",
    "fedcr": "sums over the samples of each class",
    "feddbe": "sums over the samples of each class",
    "fedcp": "a loss of whole batches",
    "gpfl": "numbers of samples of each class",
    "pfedfda": "numbers of samples of each class",
    "fedpac": "sums over the samples of each class",
    "least-squares": "features of all samples|second moments",
    "shared-least-squares": "features of all samples|second moments",
}


def run(algorithm: Algorithm, privacy: dict[str, Any] | None, **options: Any) -> Simulation:
    uploads = UploadSettings(privacy=None if privacy is None else Privacy(**privacy))
    made = simulation(algorithm, uploads=uploads, **{"rounds": 2, **options})
    made.run()
    return made


def states(made: Simulation) -> list[Tensor]:
    """Return all that a run has come to: the server's state, and those of its clients."""
    clients = [made.store.get(who) for who in range(len(made.federation))]
    return [t for state in (made.server, *clients) for t in state.values()]


def one_by_one(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradients of single samples by autograd, in the order of the module's parameters."""
    rows = []
    for k in range(len(x)):
        loss = nn.functional.cross_entropy(module(x[k : k + 1]), y[k : k + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    return torch.stack(rows)


def conv_net() -> nn.Module:
    """A network whose weights have their channels last in the vector."""
    body = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten())
    return BodyAndHead(body, nn.Linear(16, 3))


@pytest.mark.parametrize("module", [small_mlp(), conv_net()], ids=["mlp", "conv"])
def test_gradients_of_single_samples_are_autograds_and_none_is_longer_than_the_clip(module: nn.Module) -> None:
    made = simulation(FedAvg(), module=module)
    made.close()
    task = made.task
    gradients, v = SampleGradients(task), task.w0
    x, y = made.federation.gather(torch.from_numpy(made.federation.train[3]))
    alone = one_by_one(task.to_module(v).train(), x, y)
    clip = float(alone.norm(dim=1).median())
    ones = torch.ones(len(x))
    for k in range(len(x)):
        found = gradients.clipped_sum(v, x[k : k + 1], y[k : k + 1], ones[:1], 1e9)
        torch.testing.assert_close(found, alone[k], rtol=1e-10, atol=1e-13)
        assert float(gradients.clipped_sum(v, x[k : k + 1], y[k : k + 1], ones[:1], clip).norm()) <= clip
    factors = (clip / alone.norm(dim=1, keepdim=True)).clamp(max=1)
    both = gradients.clipped_sum(v, x, y, ones, clip)
    torch.testing.assert_close(both, (alone * factors).sum(0), rtol=1e-9, atol=1e-12)
    counts = (torch.arange(len(x)) % 2).double()
    some = gradients.clipped_sum(v, x, y, counts, clip)
    torch.testing.assert_close(some, (alone * factors)[1::2].sum(0), rtol=1e-9, atol=1e-12)
    stacked = gradients.clipped_sum(
        torch.stack([v, v]), torch.stack([x, x]), torch.stack([y, y]), torch.stack([ones, counts]), clip
    )
    torch.testing.assert_close(stacked, torch.stack([both, some]), rtol=1e-9, atol=1e-12)


def test_rows_are_clipped_and_those_that_are_not_finite_contribute_nothing() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.inf, 0.0], [math.nan, 1.0], [1e30, 1e30], [0.0, 0.0]])
    found = clipped_rows(rows, 1.0)
    assert float(found.norm(dim=1).max()) <= 1.0
    torch.testing.assert_close(found[0], rows[0] / 5, rtol=1e-5, atol=0)
    assert torch.equal(found[1], rows[1])
    assert not found[2:].any()


COVERED = [name for name in ALGORITHMS if name not in NOT_COVERED]


@pytest.mark.parametrize("name", COVERED)
def test_without_noise_and_with_a_huge_clip_it_is_ordinary_training(name: str) -> None:
    algorithm = registered(name)
    private = run(algorithm, {**SHUFFLED, "clip": 1e9, "sigma": 0.0})
    plain = run(algorithm, None)
    for found, wanted in zip(states(private), states(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    for key in ("gradient_samples", "bytes_up", "bytes_down"):
        assert private.summary()[key] == plain.summary()[key]


@pytest.mark.parametrize("name", COVERED)
def test_what_an_algorithm_does_with_samples_is_what_was_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of the hooks finds as many noised sums as training then draws noise for."""
    drawn: Counter[tuple[str, int]] = Counter()
    original = PrivateSteps.noised

    def counted(self: PrivateSteps, total: Tensor, waiting: Any = ()) -> Tensor:
        for k, who in enumerate(self.names):
            drawn[who, self.round] += k not in waiting and self.purpose == "batches"
        return original(self, total, waiting)

    monkeypatch.setattr(PrivateSteps, "noised", counted)
    made = run(registered(name), {"unit": "sample", "clip": 1.0, "sigma": 1.0}, participation=1.0)
    assert made.privacy.samples is not None
    for who, samples in made.privacy.sizes.items():
        assert drawn[who, 1] == drawn[who, 2] == made.privacy.samples.message(samples).gaussians


def test_each_batch_of_a_step_is_an_operation_with_as_many_gradients_as_are_asked_for() -> None:
    algorithm = PerFedAvg(version="HF", epochs=2, batch=4)
    made = simulation(algorithm)
    made.close()
    found = DataUse.of(algorithm, made.start)
    assert sorted(each.repeat for each in found.update) == [1, 1, 2]
    assert {each.epochs for each in found.update} == {2}
    assert [each.steps for each in found.personal] == [1]


def test_every_way_to_a_clients_samples_is_noised_or_refused() -> None:
    noised = {"descend", "walk", "term_gradient"}
    without_samples = {"space", "seed", "outputs", "round", "lr", "rate", "point", "reinitialised"}
    public_or_about_work = {"size", "local_steps", "iterations", "iterations_performed"}
    known = noised | without_samples | public_or_about_work | set(OPERATIONS)
    assert {name for name in (*vars(LocalData), *LocalData.__annotations__) if name[0] != "_"} == known


@pytest.mark.parametrize("name", NOT_COVERED)
def test_algorithms_that_use_samples_otherwise_are_refused_by_name(name: str) -> None:
    with pytest.raises(EquipoiseError, match=NOT_COVERED[name]) as refused:
        simulation(registered(name), uploads=UploadSettings(privacy=Privacy(unit="sample", clip=1.0, sigma=1.0)))
    assert f"does not cover {ALGORITHMS[name].__name__}" in str(refused.value)


def test_variance_reduction_and_a_stopping_rule_on_gradients_are_refused() -> None:
    for algorithm in (FedReCo(variance_reduction="partial"), registered("flame").model_copy(update={"epsilon": 0.1})):
        with pytest.raises(EquipoiseError, match="does not cover"):
            simulation(algorithm, uploads=UploadSettings(privacy=Privacy(unit="sample", clip=1.0, sigma=1.0)))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [(nn.BatchNorm1d(8), "BatchNorm, which mixes the samples"), (nn.Dropout(0.5), "draws random numbers")],
)
def test_models_without_gradients_of_single_samples_are_refused(layer: nn.Module, sentence: str) -> None:
    module = BodyAndHead(nn.Sequential(nn.Linear(5, 8), layer), nn.Linear(8, 3))
    with pytest.raises(EquipoiseError, match=sentence):
        simulation(FedAvg(), module=module, uploads=UploadSettings(privacy=Privacy(unit="sample", clip=1.0, sigma=1.0)))


@pytest.mark.parametrize("batches", ["poisson", "shuffled"])
@pytest.mark.parametrize("algorithm", [FedReCo(lr=0.1, batch=4), PerFedAvg(version="HF", lr=0.1, batch=4)])
def test_both_executors_have_the_same_noise_and_the_same_batches(algorithm: Algorithm, batches: str) -> None:
    privacy = {"unit": "sample", "clip": 0.5, "sigma": 0.7, "batches": batches}
    threads, stacked = (run(algorithm, privacy, mode=mode) for mode in ("threads", "stacked"))
    for found, wanted in zip(states(stacked), states(threads), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert stacked.summary()["gradient_samples"] == threads.summary()["gradient_samples"]
    assert stacked.summary()["privacy"] == threads.summary()["privacy"]


def test_a_step_is_the_clipped_sum_with_noise_over_the_expected_batch() -> None:
    """One round of one step, computed again by hand from the same draws."""
    privacy = Privacy(unit="sample", clip=0.2, sigma=0.3)
    made = run(Local(lr=0.5, batch=4, steps=1), privacy.table(), rounds=1, participation=1.0)
    who = 5
    name, own = made.federation.names[who], made.federation.train[who]
    n, in_epoch = len(own), math.ceil(len(own) / 4)
    noise = seeded_source(0)("batches", 1, name, 0)
    chosen = noise((n,)).numpy() < ndtri(1 / in_epoch)
    x, y = made.federation.gather(torch.from_numpy(own[chosen]))
    alone = one_by_one(made.task.to_module(made.task.w0).train(), x, y)
    total = (alone * (0.2 / alone.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    step = (total + 0.3 * noise((made.task.space.size,))) / (n / in_epoch)
    torch.testing.assert_close(made.store.get(who).v, made.task.w0 - 0.5 * step, rtol=1e-9, atol=1e-12)


def test_poisson_draws_every_sample_by_itself_and_no_operation_draws_the_same() -> None:
    privacy = Privacy(unit="sample", clip=1.0, sigma=1.0)
    algorithm = FedAvg(batch=10)
    rules = SamplePrivacy(privacy, algorithm, DataUse((), (), ()), seeded_source(1), 1)
    steps = PrivateSteps(rules, None, ["a"], [100], 1, "batches")  # type: ignore[arg-type]
    counts = np.zeros(100)
    sizes, first = [], None
    for _ in range(30):
        steps.begin()
        order = steps.batch_indices(0, epochs=2, steps=None)
        assert len(order) == 20
        first = order if first is None else first
        sizes += list((order >= 0).sum(1))
        np.add.at(counts, order[order >= 0], 1)
    assert not np.array_equal(first, order)
    draws, q = 600, 0.1
    assert abs(counts.mean() - draws * q) < 5 * math.sqrt(draws * q * (1 - q) / 100)
    assert np.var(sizes) == pytest.approx(100 * q * (1 - q), rel=0.3)  # the size of a batch is binomial
    assert counts.var() == pytest.approx(draws * q * (1 - q), rel=0.5)


def test_releases_of_a_round_are_those_of_its_steps() -> None:
    made = simulation(
        FedReCo(lr=0.1, batch=4), uploads=UploadSettings(privacy=Privacy(unit="sample", clip=1.0, sigma=1.0))
    )
    made.close()
    rules = made.privacy.samples
    assert rules is not None
    # Head, extractor (one pass of 7 steps each for 25 samples), and one batch for what is sent.
    assert rules.message(25) == SampleReleases({NoisedStep(1 / 7): 15})
    shuffled = SamplePrivacy.of(Privacy(clip=1.0, sigma=1.0, **SHUFFLED), made.task, made.algorithm, made.start, 3)
    assert shuffled.message(25) == SampleReleases({NoisedStep(1.0): 3})
    assert shuffled.whole(25, 3) == SampleReleases({NoisedStep(1.0): 9})
    pfedme = PFedMe(batch=4, local_rounds=3, inner_steps=5)
    repeated = SamplePrivacy.of(Privacy(unit="sample", clip=1.0, sigma=1.0), made.task, pfedme, made.start, 1)
    assert repeated.message(25) == SampleReleases({NoisedStep(1 / 7, 5): 3})


def test_the_model_that_is_made_after_training_is_part_of_the_budget() -> None:
    """FedAvg+FT trains after the last round; what it releases is accounted for, and every client meets the target."""
    privacy = {**SHUFFLED, "clip": 1.0, "target_epsilon": 6.0}
    made = run(FedAvgFT(lr=0.1, batch=4, finetune_epochs=2), privacy, participation=1.0)
    found = made.summary()["privacy"]
    assert found["epsilon_run"] == pytest.approx(6.0)
    assert found["sigma"] == pytest.approx(ReleaseCount(2 + 2).noise(6.0, 1e-5))
    assert found["epsilon_release"] == pytest.approx(ReleaseCount(1).epsilon(found["sigma"], 1e-5))
    assert (found["unit"], found["releases"], found["steps"]) == ("sample", 2, 4)
    assert found["not_covered"] == ["scores", "numbers of samples"]


def test_a_client_pays_for_the_rounds_in_which_it_took_part() -> None:
    made = run(FedAvg(lr=0.1, batch=4), {**SHUFFLED, "clip": 1.0, "sigma": 2.0}, rounds=4)
    most = max(made.pipeline.ledger.released.values())
    assert made.summary()["privacy"]["epsilon_run"] == pytest.approx(ReleaseCount(most).epsilon(2.0, 1e-5))


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    uploads = UploadSettings(privacy=Privacy(unit="sample", clip=0.5, sigma=0.5))

    def made(name: str, new: bool = True) -> Simulation:
        options = {"uploads": uploads, "rounds": 4, "checkpoint_every": 2, "new": new}
        return simulation(FedReCo(lr=0.1, batch=4), folder=tmp_path / name, **options)

    whole, part = made("whole"), made("part")
    whole.run()
    for _ in range(2):
        part.advance()
    part.close()
    resumed = made("part", new=False)
    resumed.resume()
    resumed.run()
    assert all(map(torch.equal, states(resumed), states(whole)))
    assert resumed.summary()["privacy"] == whole.summary()["privacy"]


def test_clients_without_training_adapt_with_noise_of_their_own() -> None:
    federation = classification(3)
    federation = replace(federation, unseen=frozenset({federation.names[2]}))
    one, other = (
        run(
            FedAvg(lr=0.1, batch=4), {**SHUFFLED, "clip": 1.0, "sigma": sigma}, federation=federation, participation=1.0
        )
        for sigma in (0.0, 5.0)
    )
    found = [next(iter(made.models_made_alone([2], "unseen"))) for made in (one, other)]
    assert all(model is not None for model in found)
    assert not torch.equal(found[0].vector, found[1].vector)
    assert other.privacy.sizes[federation.names[2]] == len(federation.train[2])


def test_compiled_steps_would_be_ignored_and_are_refused() -> None:
    with pytest.raises(EquipoiseError, match=r"engine.compile = true has no effect"):
        check_engine(Privacy(unit="sample", clip=1.0, sigma=1.0), compiled=True)
