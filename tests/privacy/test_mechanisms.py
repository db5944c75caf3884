"""Differential privacy: what leaves a client, how much noise is in it, and what that is worth."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import norm

from equipoise.algorithms import CFL, Ditto, FedAvg, Flame
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import exchanges_of
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.executors.base import SENT
from equipoise.privacy.accounting import ReleaseCount, classical_epsilon, classical_noise
from equipoise.privacy.mechanisms import (
    Noise,
    Privacy,
    clip,
    gaussian,
    public_reference,
    secure_noise,
    seeded_noise,
)
from equipoise.privacy.noised_uploads import NoisedMeanUploads
from equipoise.reducers import Mean, Median
from equipoise.reporting.comparison import compare
from equipoise.state import RoundUploads, State, Upload
from equipoise.storage.run_index import find_runs
from tests.support.commands import SMALL, equipoise_command
from tests.support.problems import simulation

NOBODY = seeded_noise(0)


def length(message: State) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for t in message.values() for v in t.double().flatten()))


def floats(width: int) -> st.SearchStrategy[float]:
    return st.floats(-(2.0**100), 2.0**100, width=width, allow_subnormal=True)


@pytest.mark.slow
@given(
    arrays(np.float32, st.integers(1, 40), elements=floats(32)),
    arrays(np.float64, st.integers(1, 40), elements=floats(64)),
    st.floats(1e-6, 1e6),
)
@settings(max_examples=300)
def test_no_message_is_longer_than_it_may_be_and_none_turns(a: np.ndarray, b: np.ndarray, c: float) -> None:
    message = State(a=torch.from_numpy(a), b=torch.from_numpy(b))
    short = clip(c)(message, NOBODY)
    assert length(short) <= c
    if length(message) <= c * (1 - 1e-6):
        assert all(torch.equal(short[k], message[k]) for k in message)
    elif length(message) > 0:
        scale = length(short) / length(message)
        for k in message:  # one factor for all fields: together they point where they did
            torch.testing.assert_close(short[k].double(), message[k].double() * scale, rtol=1e-5, atol=1e-30)
        assert length(short) >= c * (1 - 1e-5)


@given(arrays(np.float64, 12, elements=floats(64)), arrays(np.float64, 12, elements=floats(64)))
def test_two_clients_messages_never_lie_further_apart_than_twice_the_clip(a: np.ndarray, b: np.ndarray) -> None:
    one, two = (clip(0.7)(State(u=torch.from_numpy(t)), NOBODY).u for t in (a, b))
    assert float((one - two).norm()) <= 2 * 0.7 * (1 + 1e-12)


@pytest.mark.parametrize("source", [seeded_noise(1), secure_noise(), secure_noise(b"secret")])
def test_noise_has_the_stated_variance_and_no_direction(source: Noise) -> None:
    n, sigma = 200_000, 0.3
    message = State(a=torch.full((n,), 5.0).double(), b=torch.zeros(n).double())
    noise = gaussian(sigma)(message, source)
    a, b = (noise.a - message.a).numpy(), (noise.b - message.b).numpy()
    for values in (a, b):
        assert abs(values.mean()) < 5 * sigma / math.sqrt(n)
        assert abs(values.var() / sigma**2 - 1) < 5 * math.sqrt(2 / n)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(n)
    assert abs(norm.cdf(a / sigma).mean() - 0.5) < 5 / math.sqrt(12 * n)


def test_transforms_compose_in_their_order() -> None:
    message = State(u=torch.full((50_000,), 3.0).double())
    then_noise = (clip(1.0) >> gaussian(0.1))(message, NOBODY).u
    assert float(then_noise.var()) == pytest.approx(0.01, rel=0.05)
    then_clip = (gaussian(0.1) >> clip(1.0))(message, NOBODY)
    assert length(then_clip) <= 1


def test_central_noise_is_on_the_sum() -> None:
    n, m = 100_000, 5
    uploads = RoundUploads(
        tuple(range(m)), tuple(Upload(State(u=torch.full((n,), float(k)).double())) for k in range(m))
    )
    sealed = NoisedMeanUploads.of(uploads, gaussian(0.5)(State(u=torch.zeros(n).double()), seeded_noise(2)), m, "X")
    noise = (sealed.mean().u - 2.0) * m
    assert float(noise.var()) == pytest.approx(0.25, rel=0.03)
    assert len(sealed) == m
    for look in (lambda: sealed.uploads, lambda: sealed.columns("u", 0, 3), lambda: sealed.weights()):
        with pytest.raises(EquipoiseError, match="X looks at single messages"):
            look()


def delta_of(epsilon: float, z: float) -> float:
    """Of the Gaussian mechanism, exactly (Balle and Wang, 2018, Th. 8)."""
    return float(norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z))


@given(st.floats(0.3, 50), st.integers(1, 500), st.integers(1, 4), st.floats(1e-8, 0.01))
@settings(max_examples=60)
def test_epsilon_is_that_of_the_gaussian_mechanism(z: float, rounds: int, exchanges: int, delta: float) -> None:
    epsilon = ReleaseCount(rounds, exchanges).epsilon(z, delta)
    together = z / math.sqrt(rounds * exchanges)
    if epsilon == 0:
        assert delta_of(0, together) <= delta * (1 + 1e-6)
    elif epsilon < 300:
        assert delta_of(epsilon, together) == pytest.approx(delta, rel=1e-4)


def test_published_figures() -> None:
    # Dong, Roth and Su, 2022: 1-GDP is (4.377, 1e-5)-DP; Dwork and Roth's bound needs more noise for the same.
    assert ReleaseCount(1).epsilon(1.0, 1e-5) == pytest.approx(4.377, abs=1e-3)
    # Abadi et al., 2016, Sec. 3: q = 0.01, sigma = 4, 10,000 steps, delta = 1e-5 give 1.26 (Poisson sampling); what is
    # known since makes it a little less.
    import dp_accounting as dp

    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(4.0)), 10_000)
    assert 1.0 < accountant.get_epsilon(1e-5) < 1.26
    # FedReCo's Table 3: epsilon 0.2 and delta 0.1 by the textbook's rule ...
    assert classical_noise(0.2, 0.1) == pytest.approx(11.238, abs=1e-3)
    assert classical_epsilon(classical_noise(0.2, 0.1), 0.1) == pytest.approx(0.2)
    # ... which is so much noise that the pair lies within delta alone.
    assert ReleaseCount(1).epsilon(classical_noise(0.2, 0.1), 0.1) == 0
    assert classical_epsilon(1.0, 1e-5) is None


@given(st.floats(0.1, 20), st.integers(1, 200), st.integers(1, 3))
@settings(max_examples=40)
def test_the_noise_for_a_target_meets_it(target: float, rounds: int, exchanges: int) -> None:
    releases = ReleaseCount(rounds, exchanges)
    z = releases.noise(target, 1e-5)
    assert releases.epsilon(z, 1e-5) == pytest.approx(target, rel=1e-3)
    assert releases.epsilon(0.99 * z, 1e-5) > target


def test_sampling_never_costs_more_than_asking_all() -> None:
    """The bound on what it saves is loose where nearly all are drawn."""
    nearly, everyone = ReleaseCount(50, 1, 100, 99), ReleaseCount(50)
    assert nearly.noise(1.0, 1e-5) == pytest.approx(everyone.noise(1.0, 1e-5))
    assert nearly.epsilon(20.0, 1e-5) == pytest.approx(everyone.epsilon(20.0, 1e-5))
    assert ReleaseCount(500).epsilon(1e-160, 1e-5) == math.inf


@pytest.mark.slow
def test_cohorts_that_nobody_sees_help_and_more_noise_helps() -> None:
    sampled, all_of_them = ReleaseCount(20, 1, 100, 10), ReleaseCount(20, 1, 100, 100)
    assert not all_of_them.sampled
    assert sampled.epsilon(2.0, 1e-5) < all_of_them.epsilon(2.0, 1e-5)
    assert sampled.epsilon(4.0, 1e-5) < sampled.epsilon(2.0, 1e-5)
    z = sampled.noise(3.0, 1e-5)
    assert sampled.epsilon(z, 1e-5) == pytest.approx(3.0, rel=1e-3)
    # Two messages of a cohort in a round are one with the noise of both, not two draws.
    assert ReleaseCount(20, 2, 100, 10).epsilon(2.0, 1e-5) == pytest.approx(sampled.epsilon(2.0 / math.sqrt(2), 1e-5))
    assert ReleaseCount(0).epsilon(1.0, 1e-5) == 0
    assert ReleaseCount(3).epsilon(0.0, 1e-5) == math.inf


def test_noise_from_a_secret_is_that_secrets_and_other_noise_is_nobodys() -> None:
    one, two, other = secure_noise(b"a"), secure_noise(b"a"), secure_noise(b"b")
    first = one((4, 3))
    assert torch.equal(first, two((4, 3)))
    assert not torch.equal(first, other((4, 3)))
    assert not torch.equal(first, one((4, 3)))  # it goes on
    assert not torch.equal(secure_noise()((5,)), secure_noise()((5,)))
    assert secure_noise()(()).shape == ()


def finished(algorithm: Algorithm, privacy: Privacy | None, **options) -> Simulation:
    run = simulation(algorithm, uploads=UploadSettings(None, Mean(), privacy), **options)
    run.run()
    return run


@pytest.mark.parametrize("where", ["local", "central"])
def test_without_clip_and_noise_it_is_the_plain_mean(one_of_a_kind: Algorithm, where: str) -> None:
    """Every kind of algorithm goes through the channel; weights do not."""
    looks = type(one_of_a_kind).__name__ == "Learn2pFed"
    if looks and where == "central":
        with pytest.raises(EquipoiseError, match="looks at single messages"):
            finished(one_of_a_kind, Privacy(clip=1e9, sigma=0.0, where="central"))
        return
    private = finished(one_of_a_kind, Privacy(clip=1e9, sigma=0.0, where=where))
    assert "weight" not in private.schema.up
    if looks:  # it weighs messages itself
        return
    plain = finished(one_of_a_kind, None)
    for name, t in plain.server.items():
        torch.testing.assert_close(private.server[name], t, rtol=1e-9, atol=1e-11)


def test_every_algorithm_can_be_private(algorithm: Algorithm) -> None:
    run = finished(algorithm, Privacy(clip=0.1, sigma=0.001), rounds=2, participation=1.0)
    found = run.summary()["privacy"]
    assert found["epsilon_run"] > found["epsilon_release"] > 0
    assert found["releases"] == 2 * exchanges_of(algorithm)
    assert found["not_covered"] == ["scores", "failures to train"]


def test_what_fedavg_sends_differs_from_the_global_model_by_the_clip_at_most() -> None:
    sent = []

    class Watched(FedAvg):
        def aggregate(self, server, uploads, reduce):
            sent.extend((u.message.w - server.w).norm().item() for u in uploads.uploads)
            assert all(u.weight is None for u in uploads.uploads)
            return super().aggregate(server, uploads, reduce)

    finished(Watched(lr=0.5, epochs=5), Privacy(clip=0.05, sigma=0.0))
    assert max(sent) <= 0.05 * (1 + 1e-9)
    assert max(sent) > 0.049


@pytest.mark.parametrize("where", ["local", "central"])
def test_changes_of_a_last_message_are_clipped_against_what_the_server_has(where: str) -> None:
    """FLAME's reference is the client's secret; noise on the difference from it would hide nothing."""
    before: dict[int, torch.Tensor] = {}
    moved = []

    privacy = Privacy(clip=0.02, sigma=0.0, where=where)
    run = simulation(Flame(lr=0.1), uploads=UploadSettings(None, Mean(), privacy), rounds=5, participation=1.0)
    aggregate = run.aggregate

    def watched(round, uploads, names):
        for who, upload in zip(uploads.who, uploads.uploads, strict=True):
            moved.append(float((upload.message.u - before.get(who, run.start.w0)).norm()))
            before[who] = upload.message.u
        return aggregate(round, uploads, names)

    run.aggregate = watched
    run.run()
    assert max(moved) <= 0.02 * (1 + 1e-9)
    for who in range(6):
        assert torch.equal(run.store.get(who)[SENT + "u"], before[run.number[who]])


def test_a_reference_that_the_server_does_not_have_is_refused() -> None:
    down, secret = State(w=torch.ones(3)), State(w=torch.full((3,), 2.0))
    message = State(w=torch.zeros(3))
    assert public_reference(Upload(message, down), down).keys() == {"w"}
    assert not public_reference(Upload(message), down)
    assert not public_reference(Upload(message, State(w=torch.zeros(3))), down)
    with pytest.raises(TypeError, match="would not be private"):
        public_reference(Upload(message, secret), down)


def test_noise_is_the_seeds_and_another_in_every_exchange_and_for_every_client() -> None:
    privacy = Privacy(clip=1.0, sigma=0.1)
    one, two = (finished(FedAvg(lr=0.1), privacy) for _ in range(2))
    assert torch.equal(one.server.w, two.server.w)
    draws = [one.draw_noise(r, f"{e} {n}")((3,)) for r in (1, 2) for e in (0, 1) for n in "ab"]
    assert len({tuple(d.tolist()) for d in draws}) == 8


def test_the_target_is_met_with_full_and_partial_participation() -> None:
    for participation in (1.0, 0.5):
        run = finished(
            Ditto(lr=0.1), Privacy(clip=1.0, target_epsilon=5.0, delta=1e-4), rounds=6, participation=participation
        )
        found = run.summary()["privacy"]
        assert found["epsilon_run"] == pytest.approx(5.0, rel=1e-3)
        assert found["releases"] == max(run.pipeline.ledger.released.values())
    once = finished(FedAvg(lr=0.1), Privacy(clip=1.0, target_epsilon=0.2, delta=0.1, per="release", rule="classical"))
    assert once.pipeline.ledger.sigma == pytest.approx(2 * 11.238, abs=1e-3)
    assert once.summary()["privacy"]["epsilon_classical"] == pytest.approx(0.2)


def test_central_noise_on_a_sum_of_last_messages_stays_in_it() -> None:
    """A client's last message is all that it ever sent; noise on one round's sum would cover the last change alone."""
    run = simulation(Flame(lr=0.1), uploads=UploadSettings(None, Mean(), Privacy(clip=1.0, sigma=2.0, where="central")))
    uploads = RoundUploads((0, 1), tuple(Upload(State(u=torch.zeros(50_000).double())) for _ in range(2)))
    spreads = [float(run.pipeline.noised(uploads, last=True).mean().u.var()) for _ in range(4)]
    assert spreads == pytest.approx([(2.0 / 2) ** 2 * k for k in (1, 2, 3, 4)], rel=0.05)
    fresh = simulation(
        FedAvg(lr=0.1), uploads=UploadSettings(None, Mean(), Privacy(clip=1.0, sigma=2.0, where="central"))
    )
    spreads = [float(fresh.pipeline.noised(uploads, last=False).mean().u.var()) for _ in range(3)]
    assert spreads == pytest.approx([1.0] * 3, rel=0.05)
    one, two = (fresh.pipeline.noised(uploads, last=False).mean().u for _ in range(2))
    assert not torch.equal(one, two)


def test_a_resumed_run_counts_on_and_cannot_stretch_its_target(tmp_path: Path) -> None:
    privacy = Privacy(clip=1.0, target_epsilon=5.0)
    between = UploadSettings(None, Mean(), privacy)
    whole = simulation(FedAvg(lr=0.1), uploads=between, folder=tmp_path / "whole", rounds=4, checkpoint_every=2)
    whole.run()
    part = simulation(FedAvg(lr=0.1), uploads=between, folder=tmp_path / "part", rounds=4, checkpoint_every=2)
    for _ in range(2):
        part.advance()
    part.close()
    resumed = simulation(FedAvg(lr=0.1), uploads=between, folder=tmp_path / "part", rounds=4, new=False)
    resumed.resume()
    resumed.run()
    assert torch.equal(resumed.server.w, whole.server.w)
    assert resumed.summary()["privacy"] == whole.summary()["privacy"]
    longer = simulation(FedAvg(lr=0.1), uploads=between, folder=tmp_path / "part", rounds=9, new=False)
    with pytest.raises(EquipoiseError, match=r"with 9 of them privacy.target_epsilon = 5.0 needs"):
        longer.resume()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({}, "privacy needs either sigma"),
        ({"sigma": 1.0, "target_epsilon": 1.0}, "privacy needs either sigma"),
        ({"target_epsilon": 1.0, "rule": "classical"}, "say privacy.per = 'release'"),
        ({"target_epsilon": 2.0, "rule": "classical", "per": "release"}, "target_epsilon < 1"),
        ({"sigma": -1.0}, "must be a number >= 0"),
    ],
)
def test_wrong_settings_are_told_in_a_sentence(wrong: dict, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        Privacy(clip=1.0, **wrong)


def test_central_noise_needs_a_mean_and_methods_that_look_at_sums() -> None:
    central = Privacy(clip=1.0, sigma=1.0, where="central")
    with pytest.raises(EquipoiseError, match=r"reducer.name must be 'mean'"):
        UploadSettings(None, Median(), central)
    with pytest.raises(EquipoiseError, match="CFL looks at single messages"):
        finished(CFL(lr=0.1), central)


def test_without_the_accountant_its_extra_is_named_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(EquipoiseError, match="needs the package dp-accounting"):
        simulation(FedAvg(), uploads=UploadSettings(privacy=Privacy(clip=1.0, sigma=1.0)))
    with pytest.raises(EquipoiseError, match=r"pip install 'equipoise\[privacy\]'"):
        ReleaseCount(1).epsilon(1.0, 1e-5)


def test_the_command_line_says_what_is_guaranteed_and_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        SMALL.format(rounds=2, name="fedavg") + "[privacy]\nclip = 1.0\ntarget_epsilon = 8.0\n"
    )
    done = equipoise_command("run", "a.toml", "--out", "r", cwd=tmp_path)
    assert "clients' scores and failures to train are not covered" in " ".join(done.stderr.split())
    assert "ε run" in done.stdout
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())["privacy"]
    assert summary["epsilon_run"] == pytest.approx(8.0, rel=1e-3)
    (row,) = compare(find_runs([tmp_path / "r"]))
    assert row["epsilon_run"] == summary["epsilon_run"]
    text = equipoise_command("compare", "r", "--format", "md", cwd=tmp_path).stdout
    assert f"| {summary['epsilon_release']:.3g} | 8 | 1e-05 |" in text
    wrong = equipoise_command("run", "a.toml", "--out", "s", "--set", "privacy.clipp=1", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "unknown setting privacy.clipp; did you mean 'clip'?" in wrong.stderr
