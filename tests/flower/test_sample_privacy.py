"""Sample-level privacy in a deployment: noise and batches from the client's secret, counted like every release."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.algorithms import FedReCo
from equipoise.config.uploads import UploadSettings
from equipoise.errors import EquipoiseError
from equipoise.flower.client import Client
from equipoise.flower.protocol import Order
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import Privacy
from equipoise.privacy.sample_accounting import NoisedStep, SampleReleases
from tests.support.flower_memory import deployed, in_both_engines, run
from tests.support.hostile import FEDAVG, ask, down_for, private_client, run_id, softmax_model, train
from tests.support.problems import classification, small_mlp

SAMPLES: dict[str, Any] = {"unit": "sample", "clip": 0.5, "sigma": 2.0}


def update(client: Client, number: int, seed: int) -> Tensor:
    """Return the model that a client sends beside its weight."""
    facts = {"run": run_id(1), "number": number, "client": client.settings.name, "clients": 3, "train": 1}
    return ask(client, Order(**facts), down_for(client, seed))[1]["up.w"]


def test_without_noise_both_engines_are_the_same(tmp_path: Path) -> None:
    privacy = {"unit": "sample", "clip": 0.05, "sigma": 0.0, "batches": "shuffled"}
    over_flower, simulated = in_both_engines(
        tmp_path,
        FedReCo(lr=0.1, batch=4),
        classification(3),
        small_mlp(),
        UploadSettings(privacy=Privacy(**privacy)),
        {"privacy": privacy},
        participation=1.0,
        rounds=2,
    )
    torch.testing.assert_close(over_flower.server.u_0, simulated.server.u_0, rtol=1e-9, atol=1e-12)
    found = over_flower.summary()["privacy"]
    assert (found["unit"], found["releases"], found["epsilon_run"]) == ("sample", 2, None)


@pytest.mark.parametrize("batches", ["poisson", "shuffled"])
def test_the_same_question_has_the_same_answer_and_another_has_other_noise(batches: str, tmp_path: Path) -> None:
    client = private_client(tmp_path, privacy={**SAMPLES, "batches": batches})
    first, again, other = (update(client, number, seed) for number, seed in ((1, 0), (2, 0), (3, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(json.loads((tmp_path / "state" / "releases.json").read_text())["sent"]) == 2
    # Another client with the same samples has another secret.
    stranger = private_client(tmp_path, privacy={**SAMPLES, "batches": batches}, state=tmp_path / "other")
    assert not torch.equal(update(stranger, 1, 0), first)


def test_every_client_finds_its_own_noise_and_says_what_it_is_worth(tmp_path: Path) -> None:
    target = {"unit": "sample", "clip": 0.5, "target_epsilon": 4.0}
    client = private_client(tmp_path, {**FEDAVG, "batch": 5}, privacy=target, rounds=2)
    plan = client.release_plan
    assert plan is not None
    steps = SampleReleases({NoisedStep(1 / 3): 3})  # 13 samples in batches of 5
    assert plan.sigma == pytest.approx(0.5 * steps.times(2).noise(4.0, 1e-5))
    assert plan.epsilon(2) <= 4.0
    # Added up with other experiments, as if batches were known: three Gaussian steps a message.
    assert plan.z == pytest.approx(plan.sigma / 0.5 / 3**0.5)
    found = "\n".join(client.disclosures())
    assert "covered by privacy of single samples: gradients clipped and noised here" in found


def test_a_budget_of_epsilon_stops_a_client(tmp_path: Path) -> None:
    privacy = {**SAMPLES, "batches": "shuffled"}
    limit = ReleaseCount(2).epsilon(4.0, 1e-5) * 1.0001  # sigma / clip, one pass a message
    client = private_client(tmp_path, privacy=privacy, max_epsilon=limit, rounds=9)
    assert [train(client, 1, k + 1, k)[0].status for k in range(3)] == ["done", "done", "no-budget"]


def test_a_folder_that_promised_to_hide_the_client_does_not_hide_samples_only(tmp_path: Path) -> None:
    assert train(private_client(tmp_path, max_releases=9))[0].status == "done"
    client = private_client(tmp_path, privacy=SAMPLES, max_releases=9)
    assert train(client, 2)[0].status == "no-budget"


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"cohorts": "turns"}, "cohorts = 'turns' needs all clients"),
        ({"privacy": {"clip": 1.0, "sigma": 1.0, "where": "central", "bands": 2}}, "use independent noise"),
        ({"privacy": {"clip": 1.0, "sigma": 1.0, "where": "central", "adaptive": {}}}, "give a fixed privacy.clip"),
        ({"privacy": SAMPLES, "algorithm": {"name": "knn-per"}}, "does not cover KnnPer"),
    ],
)
def test_what_a_deployment_cannot_keep_is_refused(tables: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    algorithm = tables.pop("algorithm", FEDAVG)
    module = small_mlp() if algorithm["name"] == "knn-per" else softmax_model()
    app, grid = deployed(tmp_path / "app", classification(2), module, algorithm, **tables)
    with pytest.raises(EquipoiseError, match=sentence):
        run(app, grid, tmp_path / "run")
