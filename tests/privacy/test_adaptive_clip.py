"""The clip follows a quantile, and what that costs is part of the budget."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.algorithms import FedAvg
from equipoise.config.uploads import UploadSettings
from equipoise.engine.privacy_ledger import PrivacyLedger
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.adaptive_clip import AdaptiveClip
from equipoise.privacy.mechanisms import Privacy, is_within, seeded_noise
from equipoise.reducers import Mean
from equipoise.state import State
from tests.support.problems import simulation

ADAPTIVE = {"where": "central", "adaptive": AdaptiveClip(quantile=0.5, lr=0.3)}


@pytest.mark.parametrize(("z", "cohort"), [(0.5, 100), (2.0, 10), (7.0, 1000)])
def test_sum_and_number_together_have_the_multiplier_of_a_round(z: float, cohort: int) -> None:
    adaptive = AdaptiveClip()
    messages, number = adaptive.noise_of_messages(z, cohort), adaptive.noise_of_count(z, cohort)
    assert messages > z
    assert 1 / messages**2 + 1 / number**2 == pytest.approx(1 / z**2)
    # Andrew et al.'s multipliers are relative to the clip, ours to twice the clip.
    theirs = ((2 * z) ** -2 - (2 * number) ** -2) ** -0.5
    assert 2 * messages == pytest.approx(theirs)
    # As one Gaussian mechanism of the two, with different noise: exactly the epsilon that is reported.
    together = 1 / math.sqrt(messages**-2 + number**-2)
    assert ReleaseCount(9).epsilon(together, 1e-5) == pytest.approx(ReleaseCount(9).epsilon(z, 1e-5))


def test_too_little_noise_on_the_number_is_refused() -> None:
    with pytest.raises(EquipoiseError, match=r"must be more than the noise multiplier of a round, 2"):
        AdaptiveClip(count_noise=1.5).noise_of_messages(2.0, 50)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_it_converges_to_the_quantile_of_a_stream(quantile: float) -> None:
    cohort, rng = 200, np.random.default_rng(0)
    ledger = PrivacyLedger(
        Privacy(clip=30.0, sigma=60.0, where="central", adaptive=AdaptiveClip(quantile=quantile, lr=0.2))
    )
    ledger.sigma, ledger.cohort = 60.0, cohort
    seen = []
    for t in range(400):
        lengths = rng.lognormal(0.0, 0.5, cohort)
        ledger.adapt(int((lengths <= ledger.clip).sum()), seeded_noise(0, t))
        seen.append(ledger.clip)
    wanted = float(np.quantile(rng.lognormal(0.0, 0.5, 100_000), quantile))
    assert float(np.exp(np.log(seen[200:]).mean())) == pytest.approx(wanted, rel=0.05)


def test_a_message_is_within_the_clip_exactly_if_clipping_leaves_it() -> None:
    message = State(a=torch.tensor([3.0]), b=torch.tensor([4.0]))
    assert is_within(message, 5.0)
    assert not is_within(message, 4.999)
    assert is_within(State(), 0.1)


def run(folder: Path | None = None, new: bool = True, sigma: float = 0.4) -> Simulation:
    uploads = UploadSettings(None, Mean(), Privacy(clip=1.0, sigma=sigma, **ADAPTIVE))
    options = {"rounds": 4, "participation": 1.0, "checkpoint_every": 2}
    return simulation(FedAvg(lr=0.1), uploads=uploads, folder=folder, new=new, **options)


def test_noise_is_relative_to_the_clip_of_the_round_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    multipliers = []
    for _ in range(4):
        multipliers.append(whole.pipeline.ledger.sigma_of_sum / (2 * whole.pipeline.ledger.clip))
        whole.advance()
    assert multipliers == pytest.approx([AdaptiveClip().noise_of_messages(0.2, 6)] * 4)
    assert whole.pipeline.ledger.clip != 1.0
    whole.close()
    part = run(tmp_path / "part")
    part.advance()
    part.advance()
    part.close()
    resumed = run(tmp_path / "part", new=False)
    resumed.resume()
    resumed.run()
    assert torch.equal(resumed.server.w, whole.server.w)
    found = resumed.summary()["privacy"]
    assert found["clip_next"] == whole.pipeline.ledger.clip
    assert found["epsilon_run"] == pytest.approx(ReleaseCount(4).epsilon(0.2, 1e-5))


@pytest.mark.parametrize(("clip", "factor"), [(1e-6, math.exp(0.3 * 0.5)), (1e6, math.exp(-0.3 * 0.5))])
def test_a_clip_below_all_messages_grows_and_one_above_all_shrinks(clip: float, factor: float) -> None:
    begun = run(sigma=0.0)
    begun.pipeline.ledger.clip = clip
    begun.advance()
    begun.close()
    assert begun.pipeline.ledger.clip == pytest.approx(clip * factor)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"adaptive": AdaptiveClip()}, "privacy.adaptive needs the noise of the server"),
        ({"bands": 4}, "privacy.bands needs the noise of the server"),
        ({"adaptive": AdaptiveClip(), "bands": 2, "where": "central"}, "use one of the two"),
        ({"batches": "shuffled"}, "privacy.batches has no effect without"),
        ({"unit": "sample", "where": "central"}, "privacy.where has no effect with privacy.unit = 'sample'"),
        ({"unit": "sample", "per": "release"}, "privacy.per has no effect"),
    ],
)
def test_settings_that_do_not_go_together_are_told_in_a_sentence(wrong: dict, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        Privacy(clip=1.0, sigma=1.0, **wrong)


def test_defaults_are_not_written_so_that_older_results_keep_their_names() -> None:
    assert Privacy(clip=1.0, sigma=1.0).table() == {
        "clip": 1.0,
        "sigma": 1.0,
        "delta": 1e-5,
        "per": "run",
        "rule": "exact",
        "where": "local",
    }
    table = Privacy(clip=1.0, sigma=1.0, **ADAPTIVE).table()
    assert table["adaptive"] == {"quantile": 0.5, "lr": 0.3}
    assert Privacy(**table) == Privacy(clip=1.0, sigma=1.0, **ADAPTIVE)
