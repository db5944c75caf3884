"""What clients report about their duals: the right numbers, the same everywhere, and nothing under privacy."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise.algorithms import ALGORITHMS, FeDEQ
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import ReportsDiagnostics
from equipoise.algorithms.schema import infer_schema
from equipoise.config.uploads import UploadSettings
from equipoise.engine.counters import diagnostic_figures
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from equipoise.reporting import plots
from equipoise.reporting.html import drawn, scenes
from equipoise.reporting.html.clients import Clients
from equipoise.state import State
from equipoise.storage.run_index import find_runs
from tests.support.flower_memory import deployed, run, same, table
from tests.support.problems import classification, metrics, registered, simulation, small_mlp

PARTS = {"fedeq": ("theta_i", "theta", "lam_i"), "fedadmm": ("theta", "w", "pi"), "flame": ("w_i", "w", "pi")}
"""The client's copy, what is shared, and the dual, in each method's own symbols."""
PARTS["flame-lp-proj"] = PARTS["flame"]


def test_methods_with_duals_report_them() -> None:
    reporting = {name for name, cls in ALGORITHMS.items() if issubclass(cls, ReportsDiagnostics)}
    assert reporting == PARTS.keys() | {"fedamp", "pfedfda"}  # distances between models; beta


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize("name", sorted(PARTS))
def test_they_are_means_of_norms_over_the_clients_of_the_round(name: str, mode: str) -> None:
    copy, shared, dual = PARTS[name]
    sim = simulation(registered(name), mode=mode, rounds=3, participation=0.5, evaluate_every=2)
    for round in range(1, 4):
        before = sim.server[shared]
        sim.advance()
        present = [sim.store.get(i) for i in sim.sample(round)]
        gaps = [float((s[copy] - before).norm()) for s in present]
        duals = [float(s[dual].norm()) for s in present]
        found = sim.lines[-1]["diagnostics"]  # also in rounds without scores
        assert found["consensus_gap"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-12)
        assert found["dual_norm"] == pytest.approx(sum(duals) / len(duals), rel=1e-12)
        assert found["dual_norm"] > 0
    sim.close()


def test_without_duals_only_the_gap_is_reported() -> None:
    sim = simulation(ALGORITHMS["fedadmm"](dual=False), rounds=1)
    sim.run()
    assert sim.lines[0]["diagnostics"].keys() == {"consensus_gap"}


@pytest.mark.parametrize("begin", ["consensus", "published"])
def test_engines_agree_and_a_resumed_run_gives_the_same_bytes(begin: str, tmp_path: Path) -> None:
    algorithm = FeDEQ(begin=begin, rho=0.3, lr=0.05, batch=4, average="dual" if begin == "consensus" else "plain")
    kinds: dict[str, Any] = {"rounds": 5, "participation": 0.5, "checkpoint_every": 1}
    whole = simulation(algorithm, folder=tmp_path / "whole", **kinds)
    whole.run()
    first = simulation(algorithm, folder=tmp_path / "cut", **kinds)
    for _ in range(3):
        first.advance()
    first.close()
    rest = simulation(algorithm, folder=tmp_path / "cut", new=False, **kinds)
    rest.resume()
    rest.run()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    app, grid = deployed(tmp_path / "app", classification(), small_mlp(), table(algorithm), **kinds)
    over_flower = run(app, grid, tmp_path / "flower")
    for ours, theirs in zip(over_flower.lines, whole.lines, strict=True):
        same(ours, theirs)
    logged = (tmp_path / "flower" / "metrics.jsonl").read_text().splitlines()
    assert all(list(json.loads(line)["diagnostics"]) == ["consensus_gap", "dual_norm"] for line in logged)


def test_nothing_is_reported_under_privacy(tmp_path: Path) -> None:
    privacy = {"clip": 0.1, "sigma": 0.01}
    algorithm = FeDEQ(lr=0.05, batch=4, average="dual")
    sim = simulation(algorithm, uploads=UploadSettings(privacy=Privacy(**privacy)), rounds=2)
    sim.run()
    assert sim.schema.diagnostics == ()
    app, grid = deployed(tmp_path / "app", classification(), small_mlp(), table(algorithm), rounds=2, privacy=privacy)
    over_flower = run(app, grid, tmp_path / "flower")
    assert not any("diagnostics" in line for line in [*sim.lines, *over_flower.lines])
    for node in grid.nodes.values():
        assert not any(b"consensus_gap" in reply.content["equipoise"]["message"] for reply in node.sent)


def test_a_client_that_sends_no_counts_sends_none_of_them(tmp_path: Path) -> None:
    app, grid = deployed(
        tmp_path / "app", classification(3), small_mlp(), {"name": "fedeq"}, rounds=1, participation=1.0
    )
    grid.nodes[101].settings["counts"] = False
    over_flower = run(app, grid, tmp_path / "out")
    assert [any(b"dual_norm" in m.content["equipoise"]["message"] for m in n.sent) for n in grid.nodes.values()] == [
        True,
        False,
        True,
    ]
    assert over_flower.lines[0]["diagnostics"]["consensus_gap"] > 0
    assert over_flower.transport.refused == {}


@given(st.lists(st.dictionaries(st.sampled_from("ab"), st.floats(), max_size=2), max_size=8), st.randoms())
def test_the_figures_do_not_depend_on_the_order_and_ignore_impossible_numbers(
    clients: list[dict[str, float]], rng: Any
) -> None:
    found = diagnostic_figures(clients)
    rng.shuffle(clients)
    turned = [dict(reversed(client.items())) for client in clients]
    assert json.dumps(diagnostic_figures(turned)) == json.dumps(found)
    for name, value in found.get("diagnostics", {}).items():
        reported = [v for client in clients for k, v in client.items() if k == name and abs(v) <= 1e30]
        assert value == math.fsum(reported) / len(reported)


def test_what_is_no_number_per_client_is_refused_before_the_run() -> None:
    class Whole(FeDEQ):
        def diagnostics(self, client: State, down: State) -> State:
            return State(theta=client.theta_i)

    task = simulation(FeDEQ()).task
    algorithm: Algorithm = Whole()
    with pytest.raises(EquipoiseError, match=r"Whole\.diagnostics must return a State of numbers of shape \(1,\)"):
        infer_schema(algorithm, task.start(4))
    assert infer_schema(FeDEQ(), task.start(4), weighted=False).diagnostics == ()


def test_they_are_drawn_in_pictures_and_in_the_report(tmp_path: Path) -> None:
    """One curve per method that has them, at every round; runs without them are left out."""
    for seed in (0, 1):
        train(tmp_path / f"fedeq-{seed}", FeDEQ(lr=0.1, rho=0.3), seed=seed)
    train(tmp_path / "fedavg", ALGORITHMS["fedavg"](lr=0.1), seed=0)
    runs = find_runs([tmp_path])
    plots.draw("duals", runs, tmp_path / "duals.svg")
    text = (tmp_path / "duals.svg").read_text()
    assert "norm of the duals" in text
    assert "distance of the copies from the consensus" in text
    assert "fedavg" not in text.split("</metadata>")[-1]
    with pytest.raises(EquipoiseError, match="none of these runs has duals"):
        plots.draw("duals", find_runs([tmp_path / "fedavg"]), tmp_path / "none.svg")
    [scene] = scenes(runs)
    charts = {each["id"]: each for each in drawn(scene, Clients())}
    (number,) = [m.number for m in scene.methods if m.name.startswith("fedeq")]
    both = [run for run in runs if run.path.name.startswith("fedeq")]
    for name in ("dual_norm", "consensus_gap"):
        band, line = charts[f"diagnostics-{name}"]["data"]
        assert band["hoverinfo"] == "skip"
        assert line["meta"]["method"] == number
        assert line["x"] == [1, 2, 3]
        wanted = [sum(run.metrics[k]["diagnostics"][name] for run in both) / 2 for k in range(3)]
        assert line["y"] == pytest.approx(wanted, rel=1e-12)


def train(folder: Path, algorithm: Algorithm, seed: int) -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 5)).astype("float32"), rng.integers(0, 3, 20)) for _ in range(3)]
    eq.train(small_mlp(), clients, algorithm, rounds=3, evaluate_every=3, out=folder, seed=seed)
