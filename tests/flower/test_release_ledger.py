"""What a client has released is counted per state folder; a ledger that is missing, shortened or odd is refused."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.errors import RunFailed
from equipoise.flower.client import Client
from equipoise.flower.protocol import Order
from equipoise.flower.release_ledger import ReleaseLedger
from equipoise.flower.release_plan import Budget, ReleasePlan
from equipoise.privacy.accounting import ReleaseCount
from equipoise.state import State
from tests.support.commands import is_one_sentence
from tests.support.flower_memory import deployed, run
from tests.support.hostile import FEDAVG, FLAME, PRIVACY, ask, private_client, run_id, softmax_model, train
from tests.support.problems import classification

RUN = run_id(1)
QUESTION = "cd" * 32


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "state" / "releases.json"


def content(ledger: Path) -> Any:
    return json.loads(ledger.read_text())


def refused(client: Client, caplog: pytest.LogCaptureFixture, words: str, status: str, run: int = 1) -> None:
    """The client refuses a greeting and an order to train with one sentence in its log, and sends nothing."""
    for order in (lambda: ask(client, Order(run=run_id(run), hello=True))[0], lambda: train(client, run, 99, 5)[0]):
        caplog.clear()
        answer = order()
        assert (answer.status, answer.trained) == (status, 0)
        [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert record.exc_info is None or not record.exc_info
        assert words in is_one_sentence(Exception(record.getMessage()))


@pytest.mark.parametrize("algorithm", [FEDAVG, FLAME], ids=["fedavg", "flame"])
def test_it_has_one_secret_and_one_count_for_all_runs(
    algorithm: dict[str, Any], tmp_path: Path, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = private_client(tmp_path, algorithm)
    updates = [train(client, run, seed=seed)[1] for run, seed in ((1, 0), (2, 1), (2, 0), (3, 2))][:1]
    found = content(ledger)
    assert [len(found["sent"]), len(found["experiments"])] == [3, 1]
    assert found["runs"] == [run_id(1), run_id(2), run_id(3)]
    assert ledger.stat().st_mode & 0o077 == 0
    refused(client, caplog, "3 messages were released already, and 3 are allowed (one run as planned)", "no-budget", 4)
    assert not (tmp_path / "state" / run_id(4)).exists()
    # Runs that released something go on: what was sent is sent again, and models are scored.
    assert torch.equal(train(client, 1, number=9)[1], updates[0])
    assert train(client, 1, number=10, seed=7)[0].status == "no-budget"
    assert train(client, 1, number=11, round=0, evaluate=1)[0].status == "done"


def test_a_second_run_needs_a_budget_that_the_client_grants(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = private_client(tmp_path)
    assert all(train(client, 1, seed + 1, seed)[0].status == "done" for seed in range(3))
    refused(client, caplog, "set max_releases or max_epsilon", "no-budget", run=2)
    client = private_client(tmp_path, max_releases=5)
    assert [train(client, 2, seed + 1, 10 + seed)[0].status for seed in range(4)] == ["done"] * 2 + ["no-budget"] * 2
    refused(client, caplog, "5 messages were released already, and 5 are allowed (max_releases", "no-budget", run=3)


def test_a_second_deployment_finds_no_client_without_a_budget(tmp_path: Path) -> None:
    federation, options = classification(2), {"privacy": PRIVACY, "rounds": 2, "deploy": {"wait": 0.3}}
    app, grid = deployed(tmp_path / "app", federation, softmax_model(), FEDAVG, **options)
    assert run(app, grid, tmp_path / "first").transport.refused == {}
    with pytest.raises(RunFailed, match="0 clients came"):
        run(app, grid, tmp_path / "second")
    events = (tmp_path / "second" / "events.jsonl").read_text()
    assert events.count("refused (no-budget)") == 2
    for node in grid.nodes.values():
        node.settings["max_releases"] = 4
    assert run(app, grid, tmp_path / "third").transport.refused == {}


def test_less_may_be_granted_than_is_planned(tmp_path: Path) -> None:
    client = private_client(tmp_path, max_releases=1)
    assert [train(client, 1, k + 1, k)[0].status for k in range(3)] == ["done", "no-budget", "no-budget"]


def test_epsilon_is_that_of_all_releases_together(tmp_path: Path) -> None:
    """Releases of two experiments with different noise compose as one with 1 / sqrt(sum of 1 / z squared)."""
    z = 2.0  # sigma / (2 clip)
    three = ReleaseCount(3).epsilon(z, 1e-5)
    client = private_client(tmp_path, max_epsilon=three * 1.0001, rounds=50)
    assert [train(client, 1, k + 1, k)[0].status for k in range(5)] == ["done"] * 3 + ["no-budget"] * 2
    # Another experiment with half the noise: one of its messages is as much as four of the first.
    seven = ReleaseCount(7).epsilon(z, 1e-5)
    half = {**PRIVACY, "sigma": 1.0}
    client = private_client(tmp_path, privacy=half, max_epsilon=seven * 0.9999, rounds=50)
    assert train(client, 2)[0].status == "no-budget"
    client = private_client(tmp_path, privacy=half, max_epsilon=seven * 1.0001, rounds=50)
    assert [train(client, 2, k + 1, k)[0].status for k in range(2)] == ["done", "no-budget"]


def test_a_larger_delta_does_not_stretch_a_budget(tmp_path: Path) -> None:
    """A changed experiment could say that any epsilon is small, with a delta of nearly one."""
    limit = ReleaseCount(2).epsilon(2.0, 1e-5) * 1.0001
    assert train(private_client(tmp_path, max_epsilon=limit, rounds=9))[0].status == "done"
    client = private_client(tmp_path, privacy={**PRIVACY, "delta": 0.9}, max_epsilon=limit, rounds=9)
    assert [train(client, 1, k + 2, k)[0].status for k in range(3)] == ["done", "no-budget", "no-budget"]


CHANGES: dict[str, dict[str, Any]] = {
    "more rounds": {"rounds": 1000},
    "another algorithm": {"algorithm": {**FEDAVG, "lr": 0.2}},
    "less noise": {"privacy": {**PRIVACY, "sigma": 0.1}},
    "a larger clip": {"privacy": {**PRIVACY, "clip": 5.0}},
    "the noise of the server": {"privacy": {**PRIVACY, "where": "central"}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_experiment_is_no_fresh_budget(change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert train(private_client(tmp_path))[0].status == "done"
    changed = CHANGES[change]
    refused(private_client(tmp_path, **changed), caplog, "1 messages of another experiment were released", "no-budget")
    granted = private_client(tmp_path, max_releases=2, **changed)
    if "privacy" in changed:
        refused(granted, caplog, "this experiment adds less noise", "no-budget")
    else:
        assert [train(granted, 2, k + 1, k)[0].status for k in range(2)] == ["done", "no-budget"]


def test_one_message_of_two_experiments_has_two_noises(tmp_path: Path) -> None:
    """With one noise at two scales, two equations would give message and noise."""
    client = private_client(tmp_path, max_releases=9)
    plan = client.release_plan
    assert plan is not None
    state, message = tmp_path / "state", State(u=torch.ones(4).double())
    other = ReleasePlan("ab" * 32, 3, 4.0, 4.0, 1e-5, central=False)
    draws = []
    for one in (plan, other, plan):
        found = ReleaseLedger(state, one, Budget(9))
        found.admit(RUN)
        found.open(RUN, QUESTION)
        draws.append(found.noise(RUN, QUESTION, message)[0]((4,)))
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_an_experiment_without_privacy_is_refused_where_privacy_was_promised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(private_client(tmp_path))
    refused(private_client(tmp_path, privacy=None), caplog, "this experiment has no section [privacy]", "no-budget")
    for limit in ({"max_releases": 3}, {"max_epsilon": 1.0}):
        client = private_client(tmp_path, privacy=None, state=tmp_path / "new", **limit)
        refused(client, caplog, "but the experiment has no section [privacy]", "no-budget")
        assert not list((tmp_path / "new").glob("*/*"))


def test_central_noise_is_counted_but_not_accounted_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    central = {**PRIVACY, "where": "central"}
    client = private_client(tmp_path, privacy=central, max_releases=2)
    assert [train(client, 1, k + 1, k)[0].status for k in range(3)] == ["done", "done", "no-budget"]
    client = private_client(tmp_path, privacy=central, max_epsilon=100.0)
    refused(client, caplog, "in this experiment the client adds no noise", "no-budget")


def edited(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(ledger: Path) -> None:
        found = content(ledger)
        change(found)
        ledger.write_text(json.dumps(found))

    return apply


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (lambda ledger: ledger.unlink(), "releases.json is missing, but"),
    "emptied": (lambda ledger: ledger.write_text(""), "cannot be read"),
    "cut": (lambda ledger: ledger.write_text(ledger.read_text()[:-20]), "cannot be read"),
    "nested": (lambda ledger: ledger.write_text("[" * 100_000), "cannot be read"),
    "an empty secret": (edited(lambda found: found.update(secret="")), "its secret is not 64 hexadecimal digits"),
    "no secret": (edited(lambda found: found.pop("secret")), "its secret is not 64 hexadecimal digits"),
    "a short secret": (edited(lambda found: found.update(secret="ab")), "its secret is not 64 hexadecimal digits"),
    "another secret": (edited(lambda found: found.update(secret="ab" * 32)), "was shortened, or is older or another"),
    "shortened by one": (edited(lambda found: found["sent"].pop()), "{} messages here, {} then"),
    "nothing sent": (edited(lambda found: found.update(sent=[])), "0 messages here, {1} then"),
    "another order": (edited(lambda found: found["sent"].reverse()), "was shortened, or is older or another"),
    "no experiment": (edited(lambda found: found.update(experiments={})), "a message belongs to no experiment"),
    "a negative plan": (
        edited(lambda found: next(iter(found["experiments"].values())).update(planned=-1)),
        "an experiment is incomplete",
    ),
    "a list": (lambda ledger: ledger.write_text("[]"), "cannot be read"),
}


@pytest.mark.parametrize("algorithm", [FEDAVG, FLAME], ids=["fedavg", "flame"])
@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_ledger_beside_state_is_refused(
    how: str, algorithm: dict[str, Any], tmp_path: Path, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = private_client(tmp_path, algorithm)
    assert all(train(client, run)[0].status == "done" for run in (1, 2))
    train(client, 1, number=2, seed=1)
    spoil, words = SPOILT[how]
    count = len(content(ledger)["sent"])
    assert count == (2 if algorithm is FEDAVG else 3)  # with a state, the same question in another run is another one
    spoil(ledger)
    words = words.format(count - 1, count)
    refused(client, caplog, words, "failed")
    refused(client, caplog, words, "failed", run=3)


def test_an_older_ledger_is_refused_and_the_right_one_taken_again(
    tmp_path: Path, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = private_client(tmp_path)
    train(client)
    older = ledger.read_bytes()
    train(client, 2, seed=1)
    newer = ledger.read_bytes()
    ledger.write_bytes(older)
    refused(client, caplog, "1 messages here, 2 then", "failed")
    ledger.write_bytes(newer)
    assert train(client, 3, seed=2)[0].status == "done"


def test_state_without_any_ledger_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was sent without privacy, or by a version that kept no list, cannot be hidden by noise later."""
    assert train(private_client(tmp_path, privacy=None))[0].status == "done"
    refused(private_client(tmp_path), caplog, "has files of an earlier run", "failed")
    assert train(private_client(tmp_path, state=tmp_path / "another"))[0].status == "done"


def test_lists_of_version_0_1_are_counted(tmp_path: Path, ledger: Path, caplog: pytest.LogCaptureFixture) -> None:
    earlier = tmp_path / "state" / run_id(8)
    earlier.mkdir(parents=True)
    (earlier / "releases.json").write_text(json.dumps({"secret": "ab" * 32, "sent": ["1", "2"]}))
    client = private_client(tmp_path)
    assert [train(client, 8, k + 1, k)[0].status for k in range(2)] == ["done", "no-budget"]
    assert content(ledger)["earlier"] == {run_id(8): 2}
    refused(client, caplog, "3 messages were released already, and 3 are allowed", "no-budget")
    refused(private_client(tmp_path, max_epsilon=99.0), caplog, "version 0.1 did not record the noise", "no-budget")
    shutil.rmtree(earlier)
    refused(client, caplog, "3 messages were released already", "no-budget")  # they stay counted
    (tmp_path / "state" / run_id(9)).mkdir()
    (tmp_path / "state" / run_id(9) / "releases.json").write_text("{}")
    refused(client, caplog, "of version 0.1, cannot be read", "failed")


def test_noise_belongs_to_what_is_released_not_to_what_was_trained(tmp_path: Path) -> None:
    """One noise on two differences of one message would leave their difference without noise."""
    client = private_client(tmp_path)
    privacy, plan = client.plan.experiment.privacy, client.release_plan
    assert privacy is not None
    assert plan is not None
    message = State(w=torch.ones(18).double())
    ledger = ReleaseLedger(tmp_path / "state", plan, Budget(9))
    ledger.admit(RUN)
    ends = [privacy.clipped(message, State(w=torch.full((18,), at).double())) for at in (0.0, 5.0)]
    ledger.open(RUN, QUESTION)
    draws = [ledger.noise(RUN, QUESTION, end)[0]((18,)) for end in ends]
    assert not torch.equal(*draws)
