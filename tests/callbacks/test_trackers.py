"""Trackers hear what the run folder says, and no run depends on them."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise.callbacks import CALLBACKS, Callback
from equipoise.callbacks.trackers import flatten_numbers
from equipoise.config.experiment import Experiment
from equipoise.errors import EquipoiseError, Interrupted
from equipoise.runs.launch import run
from equipoise.storage.run_folder import RunFolder
from tests.support.commands import small
from tests.support.marks import slow_except
from tests.support.waiting import until

Curves = dict[str, dict[int, float]]


@pytest.fixture(autouse=True)
def own_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("WANDB_MODE", "offline")


def experiment(**more: Any) -> Experiment:
    return Experiment.parse(small(rounds=4, checkpoint_every=1, **more))


def tensorboard(out: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def mlflow_client(out: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{out.parent / 'mlflow.db'}")


def mlflow_run(out: Path) -> Any:
    client = mlflow_client(out)
    [found] = client.search_runs([client.get_experiment_by_name("equipoise").experiment_id])
    return found


def mlflow(out: Path) -> Curves:
    client, found = mlflow_client(out), mlflow_run(out)
    assert found.info.status == "FINISHED"
    assert found.data.params["algorithm.name"] == '"ditto"'
    names = [name for name in found.data.metrics if not name.startswith("summary/")]
    return {name: {m.step: m.value for m in client.get_metric_history(found.info.run_id, name)} for name in names}


def wandb_records(out: Path) -> list[Any]:
    """What Weights & Biases would upload: a log in blocks of 32 kB, whose pieces have a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((out / "wandb").glob("offline-run-*/*.wandb")):
        content, at, piece = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
            piece += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last piece
                found.append(Record.FromString(piece))
                piece = b""
    return found


def wandb(out: Path) -> Curves:
    def ended() -> bool:
        return any(record.HasField("exit") and not record.exit.exit_code for record in wandb_records(out))

    until(ended)  # a process of its own writes the file
    records = wandb_records(out)
    runs = [record.run for record in records if record.HasField("run")]
    assert {run.run_id for run in runs} == {json.loads((out / "wandb.json").read_text())["run"]}
    assert {run.project for run in runs} == {"equipoise"}
    settings = {item.key: item.value_json for item in runs[0].config.update}
    assert settings["algorithm.name"] == '"ditto"'
    curves: Curves = {}
    for record in records:
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for name in items.keys() - {"_step", "_timestamp", "_runtime"}:
                curves.setdefault(name, {})[record.history.step.num] = items[name]
    return curves


READERS: dict[str, Callable[[Path], Curves]] = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}


def written(out: Path) -> Curves:
    curves: Curves = {}
    for line in RunFolder(out).read_metrics():
        for name, value in flatten_numbers({k: v for k, v in line.items() if k != "round"}).items():
            curves.setdefault(name, {})[line["round"]] = value
    return curves


class Stop(Callback):
    """Breaks a run off as Ctrl-C would."""

    def __init__(self, after: int):
        self.after = after

    def on_round_end(self, line: dict[str, Any]) -> None:
        if line["round"] == self.after:
            raise Interrupted


@pytest.mark.parametrize("name", slow_except(READERS, "tensorboard"))
def test_a_tracker_hears_every_round_once_also_of_a_run_that_was_broken_off(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(experiment(track=[name]), out, None, False, [Stop(after=3)])
    if name == "mlflow":
        assert mlflow_run(out).info.status == "KILLED"
    run(experiment(track=[name]), out, None, True)
    expected, found = written(out), READERS[name](out)
    assert found.keys() == expected.keys()
    for key, curve in expected.items():
        assert found[key] == pytest.approx(curve, rel=1e-6), key  # event files have single precision
        assert sorted(found[key]) == sorted(curve)


@pytest.mark.slow
def test_what_is_tracked_changes_no_result(tmp_path: Path) -> None:
    run(experiment(), tmp_path / "without")
    run(experiment(track=["tensorboard", "mlflow"]), tmp_path / "with")
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("without", "with")]
    assert logs[0] == logs[1]
    # It may be switched on and off between a run and its continuation, and is no other run in tables.
    run(experiment(), tmp_path / "with", None, True)


@pytest.mark.parametrize("moment", ["on_run_begin", "on_round_end", "on_run_end"])
def test_a_tracker_that_fails_is_told_of_once_and_the_run_goes_on(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    class Listener(Callback):
        def on_message(self, text: str) -> None:
            texts.append(text)

    def fail(*_: Any) -> None:
        raise ConnectionError("nobody at home")

    monkeypatch.setattr(CALLBACKS["tensorboard"], moment, fail)
    run(experiment(track=["tensorboard"]), tmp_path / "run", None, False, [Listener()])
    assert len([t for t in texts if "nobody at home" in t]) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 4


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_what_is_not_installed_is_said_before_the_run(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(wanted: str, *rest: Any) -> Any:
        if wanted.startswith(package):
            raise ImportError(wanted)
        return real(wanted, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EquipoiseError, match=rf"needs {name}, which is not installed; pip install 'equipoise\[{name}"):
        run(experiment(track=[name]), tmp_path / "run")
    assert not (tmp_path / "run" / "run.toml").exists()


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(EquipoiseError, match="track"):
        experiment(track=["comet"])
