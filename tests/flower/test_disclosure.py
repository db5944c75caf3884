"""A client's owner sees all that leaves it before it joins, and can switch off what privacy does not cover."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from equipoise.errors import EquipoiseError
from equipoise.flower.protocol import STATUSES, Answer, Order, answer_shapes
from equipoise.privacy.accounting import ReleaseCount
from tests.support.flower_memory import deployed, run
from tests.support.hostile import FLAME, PRIVACY, ask, down_for, private_client, run_id, softmax_model, train
from tests.support.problems import classification

BY_SAMPLES = {**FLAME, "alpha": "samples"}
LISTED: dict[str, str] = {
    **dict.fromkeys(("protocol", "run", "number", "trained", "evaluated"), "the order's own numbers"),
    "client": "its name",
    "status": "one word of status",
    "unseen": "whether it trains",
    "layout": "the layout of its model",
    "size": "the number of training samples, when it joins",
    "samples": "counters: samples processed in training",
    "adapted": "and for scores",
    **dict.fromkeys((f for f in Answer.model_fields if "solve" in f or "iterations" in f), "equilibrium solves"),
    **dict.fromkeys((f for f in Answer.model_fields if "unconverged" in f), "equilibrium solves"),
    **dict.fromkeys(("measured", "radius"), "spectral radii"),
    "counts": "only that they are switched off",
}
"""Where the list names each fact of an answer; the order's own numbers are what the server sent itself."""


def lines(tmp_path: Path, **options: Any) -> str:
    return "\n".join(private_client(tmp_path, **options).disclosures())


def test_everything_that_an_answer_may_contain_is_listed(tmp_path: Path) -> None:
    client = private_client(tmp_path, privacy=None, metrics=["accuracy", "per-class-recall"])
    everything = "\n".join(client.disclosures())
    everything += lines(tmp_path, counts=False) + lines(tmp_path, algorithm=BY_SAMPLES)
    assert LISTED.keys() == Answer.model_fields.keys()
    for field, words in LISTED.items():
        assert words in everything, field
    for status in STATUSES:
        assert status in everything
    for name in answer_shapes(client.schema, client.task.metrics):
        kind, _, tensor = name.partition(".")
        words = {"up": f"{tensor} [", "scores": "- scores: " if tensor != "sizes" else "- sizes: "}
        words["diagnostics"] = "- diagnostics: one number each with every update: consensus_gap, dual_norm"
        assert words.get(kind, "- confusion matrices: 3 x 3 numbers") in everything
    assert "none of this is covered by privacy" in everything


def test_what_privacy_covers_and_what_not(tmp_path: Path) -> None:
    found = lines(tmp_path, metrics=["accuracy", "per-class-recall"])
    one, three = (f"{ReleaseCount(n).epsilon(2.0, 1e-5):.4g}" for n in (1, 3))
    assert "- an update of 18 numbers for every order to train: w [18] (18 numbers)" in found
    assert f"covered by privacy: clipped and noised here (sigma 2); epsilon {one} for one, {three} for all 3" in found
    for what in ("- scores:", "- sizes:", "- confusion matrices:", "- counters:", "- its name", "- not sent, but seen"):
        [line] = [line for line in found.splitlines() if line.startswith(what)]
        assert line.endswith("(not covered by privacy)")
    assert "equilibrium" not in found  # these counters are not sent under privacy
    assert "epsilon infinity for one" in lines(tmp_path, privacy={**PRIVACY, "sigma": 0.0})
    central = lines(tmp_path, privacy={**PRIVACY, "where": "central"})
    assert "clipped, but without noise: the server adds noise to the sum and must be trusted" in central
    assert "an update" not in lines(tmp_path, unseen=True)


def test_it_is_in_the_log_before_the_client_joins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = private_client(tmp_path)
    with caplog.at_level(logging.INFO, "equipoise"):
        assert ask(client, Order(run=run_id(1), hello=True))[0].status == "hello"
    for line in client.disclosures():
        assert line in caplog.text
    assert "0 messages were released from" in caplog.text
    assert "at most 3 messages may be" in caplog.text
    train(client)
    caplog.clear()
    with caplog.at_level(logging.INFO, "equipoise"):
        ask(client, Order(run=run_id(1), hello=True))
    assert caplog.text == ""


def test_scores_and_counts_can_be_switched_off(tmp_path: Path) -> None:
    evaluating = {"evaluate": 1, "shared": "down.w"}
    answer, _ = train(private_client(tmp_path), **evaluating)
    assert answer.samples > 0
    assert answer.evaluated == 1
    for switch in ({"counts": False}, {"evaluate": False}):
        client = private_client(tmp_path, state=tmp_path / next(iter(switch)), **switch)
        order = Order(run=run_id(1), number=1, client=client.settings.name, clients=3, train=1, **evaluating)
        answer, tensors = ask(client, order, down_for(client, 0))
        assert (answer.status, answer.evaluated, answer.adapted, list(tensors)) == ("done", 0, 0, ["up.w"])
        assert (answer.samples == 0) == ("counts" in switch)
        assert "- no scores, no sizes of splits, no confusion matrices" in client.disclosures()
    table = Answer(run=run_id(1), number=1, client="a").table()
    assert not {"counts", "measured", "radius"} & table.keys()  # as in version 0.1


def test_counts_that_the_algorithm_needs_cannot_be_switched_off(tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match="flame needs the number of training samples") as caught:
        private_client(tmp_path, BY_SAMPLES, counts=False)
    assert "counts = false in the client's settings" in str(caught.value)
    with pytest.raises(EquipoiseError, match=r"without \[privacy\] the weight in every update is the number"):
        private_client(tmp_path, privacy=None, counts=False)


def test_the_server_copes_with_missing_counts_and_says_whose(tmp_path: Path) -> None:
    app, grid = deployed(tmp_path / "app", classification(3), softmax_model(), {"name": "fedavg"}, privacy=PRIVACY)
    grid.nodes[101].settings["counts"] = False
    deployment = run(app, grid, tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert deployment.transport.refused == {}
    assert summary["counts_missing"] == ["client-1"]
    assert summary["gradient_samples"] > 0
    assert set(deployment.scores.rows) == {"client-0", "client-2"}
