"""A server that forges orders cannot make a client release more than its own settings allow."""

import json
import random
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.flower.client import Client
from equipoise.flower.client_state import ClientStateFile
from equipoise.flower.protocol import Order
from equipoise.flower.release_ledger import ReleaseLedger
from equipoise.flower.release_records import message_digest
from equipoise.state import State
from equipoise.storage import atomic_files
from tests.support.flower_memory import Killed
from tests.support.hostile import CLIP, FEDAVG, FLAME, PARAMETERS, SIGMA, ask, down_for, private_client, run_id, train

LIMIT = 8
ORDERS = 500


@dataclass
class Watched:
    """All that left a client, beside what it would have sent without noise."""

    truths: list[State] = field(default_factory=list)
    "clipped differences without noise, in the order in which they were to be released"
    questions: list[str] = field(default_factory=list)
    "the questions that they answered"
    noised: dict[str, set[str]] = field(default_factory=dict)
    "digests of the noised differences that left, by the question"
    about_target: list[Tensor] = field(default_factory=list)
    "noised differences that left in answer to the message that the server sends again and again"


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found, draw = Watched(), ReleaseLedger.noise

    def noise(self: ReleaseLedger, run: str, question: str, message: State) -> Any:
        drawn = draw(self, run, question, message)
        found.truths.append(message)
        found.questions.append(question)
        return drawn

    monkeypatch.setattr(ReleaseLedger, "noise", noise)
    return found


def forged(rng: random.Random, client: Client, honest: int, step: int) -> tuple[Order, dict[str, Tensor], bool]:
    """Return an order that no honest server would send, its tensors, and whether it asks about the target."""
    target = rng.random() < 0.6
    huge = lambda: rng.choice([0, 1, 2, 3, 10**6, 2**53])  # noqa: E731
    facts: dict[str, Any] = {
        "run": run_id(rng.choice([rng.getrandbits(128), 7, 8])),
        "hello": rng.random() < 0.1,
        "number": step if rng.random() < 0.9 else huge() % 2**40,
        "exchange": huge(),
        "client": client.settings.name if rng.random() < 0.95 else rng.choice(["", "another", "x" * 256]),
        "clients": huge() or 1,
        "samples": huge(),
        "malicious": rng.random() < 0.2,
        "iterations": huge(),
        "accepted": rng.choice([0, 0, 0, huge()]),
        "within": rng.choice([0, 0, 0, huge()]),
        "train": rng.choice([1, 1, 1, 2, 3, 10**9]) if rng.random() < 0.85 else 0,
        "evaluate": rng.choice([0, 0, 1, 2**53]),
        "finish": rng.random() < 0.05,
    }
    assert facts["run"] != run_id(honest)
    return Order(**facts), down_for(client, 0 if target else rng.randrange(1, 400)), target


@pytest.mark.parametrize("algorithm", [FEDAVG, FLAME], ids=["fedavg", "flame"])
def test_hundreds_of_forged_orders_get_no_more_than_what_was_granted(
    algorithm: dict[str, Any], watched: Watched, tmp_path: Path
) -> None:
    client = private_client(tmp_path, algorithm, max_releases=LIMIT, evaluate=False)
    honest, rng = 1, random.Random(24)
    first = train(client, honest, number=1)[1]
    kept = (tmp_path / "state" / run_id(honest) / "state.safetensors").read_bytes()
    left = {message_digest(State(u=first))}
    answered = {"done": 0, "no-budget": 0}
    for step in range(ORDERS):
        order, tensors, target = forged(rng, client, honest, step)
        before = len(watched.truths)
        answer, sent = ask(client, order, tensors)
        answered[answer.status] = answered.get(answer.status, 0) + 1
        up = State({k.removeprefix("up."): t for k, t in sent.items() if k.startswith("up.")})
        assert bool(up) == bool(answer.trained)
        if up:
            assert len(watched.truths) == before + 1
            truth = watched.truths[-1]
            reference = (
                {k: tensors[f"down.{k}"] for k in truth if f"down.{k}" in tensors} if algorithm is FEDAVG else {}
            )
            noised = State({k: t - reference.get(k, 0) for k, t in up.items()})
            watched.noised.setdefault(watched.questions[-1], set()).add(message_digest(noised))
            left.add(message_digest(State(u=torch.cat(list(up.values())))))
            if target:
                watched.about_target.append(torch.cat([noised[k].flatten() - truth[k].flatten() for k in truth]))
    assert answered["done"] >= LIMIT - 1  # the attack did reach the place where noise is added
    assert answered["no-budget"] > ORDERS / 10
    assert 1 < len(left) <= LIMIT
    assert len(watched.noised) <= LIMIT
    assert all(len(noises) == 1 for noises in watched.noised.values()), "one question had two answers"
    # Averaging is worth no more than the releases that were granted. (With fresh noise it would be ORDERS of them.)
    error = torch.stack(watched.about_target).mean(0).norm() / (SIGMA * watched.about_target[0].numel() ** 0.5)
    assert error > 0.3 / LIMIT**0.5
    # The honest run has lost nothing: its state is as it was, and its message is repeated with the same noise.
    assert (tmp_path / "state" / run_id(honest) / "state.safetensors").read_bytes() == kept
    assert torch.equal(train(client, honest, number=2)[1], first)


def test_the_same_question_has_the_same_answer_in_every_run(tmp_path: Path) -> None:
    """In version 0.1 every run had its own secret, so that as many runs got as much fresh noise to average away."""
    client = private_client(tmp_path)
    answers = [train(client, run) for run in range(100)]
    assert {answer.status for answer, _ in answers} == {"done"}
    assert len({message_digest(State(u=update)) for _, update in answers}) == 1


def test_noise_is_drawn_for_what_is_released_after_clipping(watched: Watched, tmp_path: Path) -> None:
    """The server chooses the reference: noise drawn for the message before would serve two references."""
    client = private_client(tmp_path)
    far = {name: t + 5 for name, t in down_for(client, 0).items()}
    ask(client, Order(run=run_id(1), number=1, client=client.settings.name, train=1), far)
    [truth] = watched.truths
    assert 0 < float(truth.w.norm()) <= CLIP


def tensors_at(client: Client, w: Tensor) -> dict[str, Tensor]:
    return {**down_for(client, 0), "down.w": w}


def train_at(client: Client, w: Tensor, number: int) -> Any:
    order = Order(run=run_id(1), number=number, client=client.settings.name, clients=3, train=1)
    answer, sent = ask(client, order, tensors_at(client, w))
    return answer.status, sent.get("up.w")


def test_two_questions_with_the_same_answer_do_not_look_the_same(watched: Watched, tmp_path: Path) -> None:
    """At weights of 1e30 no sample changes anything: equal answers would tell, without noise, that nothing changed."""
    client = private_client(tmp_path, max_releases=9)
    noises = []
    for number in (1, 2):
        w = torch.full((PARAMETERS,), number * 1e30, dtype=torch.float64)
        status, _ = train_at(client, w, number)
        assert status == "done"
        assert float(watched.truths[-1].w.abs().max()) == 0
        noises.append(ReleaseLedger.noise(client.ledger, run_id(1), watched.questions[-1], watched.truths[-1])[0]((3,)))
    assert not torch.equal(*noises)
    records = json.loads((tmp_path / "state" / "releases.json").read_text())
    assert len(records["sent"]) == 2


def test_after_the_budget_no_question_tells_anything_of_the_data(tmp_path: Path) -> None:
    """Neither one whose answer was given before, nor one that makes training overflow."""
    client = private_client(tmp_path, max_releases=1, evaluate=False)
    assert train_at(client, torch.full((PARAMETERS,), 1e30, dtype=torch.float64), 1)[0] == "done"
    huge = torch.finfo(torch.float64).max
    for number, value in enumerate((2e30, huge, huge / 2, 0.0, -1e25), start=2):
        assert train_at(client, torch.full((PARAMETERS,), value, dtype=torch.float64), number)[0] == "no-budget"


def test_a_client_whose_training_diverges_answers_with_noise_alone(tmp_path: Path) -> None:
    """Whether a message makes training overflow depends on the data."""
    client = private_client(tmp_path, max_releases=2)
    w = torch.full((PARAMETERS,), torch.finfo(torch.float64).max, dtype=torch.float64)
    w[::2] *= -1
    status, sent = train_at(client, w, 1)
    assert status == "done"
    assert bool(torch.isfinite(sent).all())
    records = json.loads((tmp_path / "state" / "releases.json").read_text())
    assert len(records["sent"]) == 1


def test_a_flood_of_greetings_changes_nothing(tmp_path: Path) -> None:
    client = private_client(tmp_path)
    assert {ask(client, Order(run=run_id(k), hello=True))[0].status for k in range(50)} == {"hello"}
    assert list((tmp_path / "state").iterdir()) == []


def test_a_client_that_does_not_train_releases_nothing(tmp_path: Path) -> None:
    client = private_client(tmp_path, unseen=True)
    answer, update = train(client)
    assert (answer.status, update) == ("failed", None)


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # run
        st.integers(0, 3),  # message down
        st.integers(1, 2),  # round
        st.sampled_from(["", "", "before the ledger", "after the ledger", "restart"]),
    ),
    max_size=14,
)


def killed(*_: Any, **__: Any) -> None:
    raise Killed


@settings(max_examples=25, deadline=None, derandomize=True)
@given(events=EVENTS, limit=st.integers(1, 4), algorithm=st.sampled_from([FEDAVG, FLAME]))
def test_no_sequence_of_orders_and_crashes_releases_more(
    events: list[tuple[int, int, int, str]], limit: int, algorithm: dict[str, Any]
) -> None:
    """A crash between the ledger and the answer costs a release at most, and never gives one away."""
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        client = private_client(Path(name), algorithm, max_releases=limit)
        truths: list[str] = []
        draw = ReleaseLedger.noise

        def noise(self: ReleaseLedger, run: str, question: str, message: State) -> Any:
            truths.append(question)
            return draw(self, run, question, message)

        patch.setattr(ReleaseLedger, "noise", noise)
        left: dict[str, str] = {}
        for number, (run, seed, round, crash) in enumerate(events, start=1):
            if crash == "restart":
                client = Client(client.plan, client.given)
            truths.clear()
            with pytest.MonkeyPatch.context() as broken, suppress(Killed):
                if crash == "before the ledger":
                    broken.setattr(atomic_files, "atomic_write", killed)
                elif crash == "after the ledger":
                    broken.setattr(ClientStateFile, "write", killed)
                answer, update = train(client, run, number, seed, round)
                if update is not None:
                    # FLAME's reference is the first upload, zeros, as no update is ever accepted here.
                    difference = update - down_for(client, seed)["down.w"] if algorithm is FEDAVG else update
                    seen = message_digest(State(u=difference))
                    assert left.setdefault(truths[-1], seen) == seen
                else:
                    assert answer.status == "no-budget"
        assert len(left) <= limit
