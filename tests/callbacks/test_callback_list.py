"""Callbacks of one's own: what they are told and when, what they may do, and what happens if they raise."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import equipoise as eq
from equipoise.callbacks import CALLBACKS
from equipoise.callbacks.base import Line
from equipoise.config.experiment import Experiment
from equipoise.errors import Interrupted
from equipoise.runs.launch import run
from equipoise.storage.run_folder import ONLY_WATCH
from tests.support.callbacks import CLIENTS, Kill, Listener, StopAt, contents, module, train
from tests.support.commands import equipoise_command, one_sentence, small
from tests.support.flower_memory import Killed


def test_callbacks_are_told_everything_in_order(tmp_path: Path) -> None:
    heard = Listener()
    result = train([heard], rounds=4, evaluate_every=2, out=tmp_path / "run")
    kinds = [event[:2] for event in heard.events[:-1]]
    assert kinds == [
        ("begin", 0), ("round", 1), ("evaluation", 2), ("round", 2), ("round", 3), ("evaluation", 4), ("round", 4),
    ]  # fmt: skip
    assert [event[2] for event in heard.events if event[0] == "round"] == result.metrics
    assert heard.events[-1] == ("end", json.loads((tmp_path / "run" / "summary.json").read_text()))


def test_a_callback_sees_the_run(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Look(eq.Callback):
        def on_round_end(self, line: Line) -> None:
            run = self.run
            seen.update(
                rounds=run.rounds,
                done=run.done,
                lines=len(run.lines),
                folder=run.folder,
                clients=list(run.clients),
                metric=run.metric,
                higher=run.higher_is_better,
                algorithm=run.settings["algorithm"]["name"],
            )
            line["round"] = 99  # what it does with its copy is its own affair

    result = train([Look()], rounds=3, out=tmp_path / "run")
    assert seen == {
        "rounds": 3, "done": 3, "lines": 2, "folder": tmp_path / "run", "clients": [f"client-{k}" for k in range(4)],
        "metric": "accuracy", "higher": True, "algorithm": "ditto",
    }  # fmt: skip
    assert [line["round"] for line in result.metrics] == [1, 2, 3]
    with pytest.raises(eq.EquipoiseError, match="Look belongs to no run yet"):
        Look().stop("too early")


def test_a_run_stops_in_its_rounds_only_and_by_those_who_may() -> None:
    class TooEarly(eq.Callback):
        def on_run_begin(self) -> None:
            self.stop("now")

    class Watcher(StopAt):
        affects_results = False

    with pytest.raises(eq.EquipoiseError, match="a run cannot stop before its first round"):
        train([TooEarly()])
    with pytest.raises(eq.EquipoiseError, match="Watcher says affects_results = False, so it cannot stop a run"):
        train([Watcher(round=2)])


@pytest.mark.parametrize("evaluate_every", [1, 5])
def test_a_message_may_stop_a_run_and_the_first_reason_counts(evaluate_every: int) -> None:
    class Mine(eq.Callback):
        def on_round_end(self, line: Line) -> None:
            if line["round"] == 2:
                self.run.report("round 2")
                self.stop("later")

        def on_message(self, text: str) -> None:
            self.stop(text)

    with pytest.warns(eq.RunWarning, match="round 2"):
        result = train([Mine()], evaluate_every=evaluate_every)
    assert (result.summary["rounds"], result.summary["stopped"]) == (2, "round 2")
    assert "personal" in result.metrics[-1]


def test_settings_of_a_callback_do_not_change_and_its_state_does() -> None:
    callback = StopAt(round=3)
    callback.count = 1
    with pytest.raises(eq.EquipoiseError, match=r"StopAt.round is a setting"):
        callback.round = 4
    assert (callback.round, callback.count, callback.table()) == (3, 1, {"round": 3})


class Counting(eq.Callback):
    """Counts in a way that no line of metrics could tell again, and stops at ten."""

    def on_run_begin(self) -> None:
        self.total = 0

    def on_round_end(self, line: Line) -> None:
        self.total += line["round"]
        if self.total >= 10:
            self.stop("counted to ten")

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


@pytest.mark.parametrize("after", [1, 3, 4])
def test_the_state_of_a_callback_is_saved_with_the_run(after: int, tmp_path: Path) -> None:
    whole = train([Counting()], out=tmp_path / "whole", checkpoint_every=2)
    assert whole.summary["rounds"] == 4
    with pytest.raises(Killed):
        train([Counting(), Kill(after)], out=tmp_path / "killed", checkpoint_every=2)
    train([Counting()], out=tmp_path / "killed", resume=True, checkpoint_every=2)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


class Raising(eq.Callback):
    """Raises where it is told to, in one round."""

    hook: str
    armed: bool = True

    def on_run_begin(self) -> None:
        self._maybe("on_run_begin")

    def on_evaluation(self, line: Line) -> None:
        self._maybe("on_evaluation", line["round"])

    def on_round_end(self, line: Line) -> None:
        self._maybe("on_round_end", line["round"])

    def on_message(self, text: str) -> None:
        self._maybe("on_message")

    def on_run_end(self, summary: dict[str, Any]) -> None:
        self._maybe("on_run_end")

    def state_dict(self) -> dict[str, Any]:
        self._maybe("state_dict")
        return {"not JSON": {1, 2}} if self.hook == "not JSON" else {}

    def _maybe(self, hook: str, round: int = 2) -> None:
        if self.hook == hook and round == 2 and not (self.run.folder / "fixed").exists():
            raise KeyError("mine")


class Speak(eq.Callback):
    """Says something in round 2."""

    affects_results = False

    def on_evaluation(self, line: Line) -> None:
        if line["round"] == 2:
            self.run.report("round 2 is special")


@pytest.mark.parametrize("hook", ["on_evaluation", "on_round_end", "on_message"])
def test_a_callback_that_raises_loses_no_round(hook: str, tmp_path: Path) -> None:
    whole = train([], rounds=5, out=tmp_path / "whole")
    with (
        pytest.warns(eq.RunWarning, match="round 2 is special"),
        pytest.raises(eq.RunFailed, match=rf"callback Raising failed in {hook}: KeyError: 'mine' \(test_callback_list"),
    ):
        train([Speak(), Raising(hook=hook)], rounds=5, out=tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run" / "checkpoint" / "round-000002.json").exists()
    assert not (tmp_path / "run" / "summary.json").exists()
    (tmp_path / "run" / "fixed").touch()
    train([Raising(hook=hook)], rounds=5, out=tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert whole.summary["rounds"] == 5


@pytest.mark.parametrize("hook", ["state_dict", "not JSON"])
def test_a_state_that_cannot_be_saved_is_said(hook: str, tmp_path: Path) -> None:
    with pytest.raises(eq.RunFailed, match=r"the callback Raising failed in state_dict: (KeyError|TypeError)"):
        train([Raising(hook=hook)], rounds=4, out=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "round-000003.json").exists()


def test_what_raises_before_the_first_round_leaves_no_run_and_what_raises_at_the_end_leaves_a_whole_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(eq.EquipoiseError, match="the callback Raising failed in on_run_begin"):
        train([Raising(hook="on_run_begin")], rounds=2, out=tmp_path / "begin")
    assert not (tmp_path / "begin" / "run.toml").exists()
    with pytest.raises(eq.RunFailed, match="the run is finished and its results are complete, but the callback"):
        train([Raising(hook="on_run_end")], rounds=2, out=tmp_path / "end")
    assert json.loads((tmp_path / "end" / "summary.json").read_text())["rounds"] == 2


@pytest.mark.parametrize(("error", "failed"), [(Interrupted(), False), (KeyboardInterrupt(), False), (OSError(), True)])
def test_callbacks_hear_of_a_run_that_does_not_end(error: BaseException, failed: bool) -> None:
    class Breaks(eq.Callback):
        def on_round_end(self, line: Line) -> None:
            raise error

    heard = Listener()
    with pytest.raises((Interrupted, KeyboardInterrupt, eq.RunFailed)):
        train([heard, Breaks()], rounds=3)
    assert heard.events[-1] == ("interrupt", failed)


def test_those_that_only_watch_are_no_settings_of_a_run(tmp_path: Path) -> None:
    assert set(ONLY_WATCH) == {name for name, cls in CALLBACKS.items() if not cls.affects_results}
    tables = small(rounds=2, callbacks=[{"name": "checkpoints", "every": 1}])
    run(Experiment.parse(tables), tmp_path / "run")
    run(Experiment.parse({**tables, "callbacks": [{"name": "progress"}]}), tmp_path / "run", resume=True)
    changed = Experiment.parse({**tables, "callbacks": [{"name": "early-stopping"}]})
    with pytest.raises(eq.EquipoiseError, match=r"had no setting callbacks.early-stopping"):
        run(changed, tmp_path / "run", resume=True)


def test_a_checkpoint_that_a_callback_asks_for_loses_no_line(tmp_path: Path) -> None:
    class Saves(eq.Callback):
        def on_evaluation(self, line: Line) -> None:
            if line["round"] == 2:
                self.run.save_checkpoint()

    class Dies(eq.Callback):
        affects_results = False

        def on_round_end(self, line: Line) -> None:
            if line["round"] == 3 and not (tmp_path / "again").exists():
                raise KeyboardInterrupt

    options = {"rounds": 5, "out": tmp_path / "run", "checkpoint_every": 100}
    with pytest.raises(KeyboardInterrupt):
        train([Saves(), Dies()], **options)
    (tmp_path / "again").touch()
    result = train([Saves(), Dies()], resume=True, **options)
    assert [line["round"] for line in result.metrics] == [1, 2, 3, 4, 5]


def test_checkpoints_are_written_when_they_are_due(tmp_path: Path) -> None:
    class Names(eq.Callback):
        affects_results = False

        def on_run_begin(self) -> None:
            self.saved: list[list[str]] = []

        def on_round_end(self, line: Line) -> None:
            self.saved.append(sorted(path.name for path in (tmp_path / "run" / "checkpoint").glob("round-*.json")))

    names = Names()
    train([eq.Checkpoints(every=2), names], rounds=4, out=tmp_path / "run", checkpoint_every=100)
    two, four = "round-000002.json", "round-000004.json"
    assert names.saved == [[], [], [two], [two]]  # written once the round is logged, after all callbacks
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").glob("round-*.json")) == [two, four]
    train([eq.Checkpoints(minutes=1e-9), names], rounds=2, out=tmp_path / "often", checkpoint_every=100)
    assert (tmp_path / "often" / "checkpoint" / "round-000001.json").exists()
    with pytest.raises(eq.EquipoiseError, match="checkpoints need a run folder"):
        train([eq.Checkpoints(every=2)], rounds=1)
    with pytest.raises(eq.EquipoiseError, match="it needs every = ROUNDS or minutes = MINUTES"):
        eq.Checkpoints()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (eq.EarlyStopping, r"which is not a callback; say EarlyStopping\(\)"),
        (print, "which is not a callback; it must derive from equipoise.Callback"),
        ("early-stoping", "'early-stoping' is unknown; did you mean 'early-stopping'"),
    ],
)
def test_what_is_no_callback_is_said(given: Any, message: str) -> None:
    with pytest.raises(eq.EquipoiseError, match=message):
        eq.train(module(), CLIENTS, eq.FedAvg(), head=None, rounds=1, callbacks=[given])


OWN = """
import equipoise as eq

class Mine(eq.Callback):
    "Stops at a round."
    last: int = 2
    "the round"

    def on_round_end(self, line):
        if line["round"] == self.last:
            self.stop("mine")

class Broken(eq.Callback):
    def on_round_end(self, line):
        raise ValueError("oh no")

class Initialised(eq.Callback):
    def __init__(self, n):
        self.n = n

class Other: ...
"""


def own_toml(folder: Path, *callbacks: dict[str, Any]) -> None:
    (folder / "own.py").write_text(OWN)
    (folder / "run.toml").write_text(tomli_w.dumps(small(rounds=4, callbacks=list(callbacks))))


def test_a_callback_of_ones_own_from_a_file(tmp_path: Path) -> None:
    own_toml(tmp_path, {"name": "own.py:Mine", "last": 3})
    done = equipoise_command("run", "run.toml", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "equipoise: the run stopped after round 3: mine" in done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["rounds"], summary["stopped"]) == (3, "mine")
    # run.toml can be run again
    again = equipoise_command("run", "out/run.toml", "--out", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    # and a run that stopped does nothing more
    resumed = equipoise_command("run", "run.toml", "--out", "out", "--resume", "--set", "rounds=9", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "the run stopped after round 3: mine" in resumed.stderr
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("table", "code", "words"),
    [
        (
            {"name": "own.py:Broken"},
            1,
            ["callback Broken failed in on_round_end: ValueError: oh no (own.py, line 15)"],
        ),
        ({"name": "own.py:Broken"}, 1, ["all rounds so far are saved"]),
        ({"name": "own.py:Mine", "lst": 3}, 2, ["unknown setting callbacks.lst; did you mean 'last'"]),
        ({"name": "own.py:Mine", "last": "x"}, 2, ["callbacks.last = 'x' is not allowed; it must be a whole number"]),
        ({"name": "own.py:Initialised"}, 2, ["has an __init__ of its own"]),
        ({"name": "own.py:Other"}, 2, ["must be a class that derives from equipoise.Callback"]),
        ({"name": "own.py:Nothing"}, 2, ["there is no Nothing in own.py"]),
        ({"patience": 3}, 2, ["callbacks.name is missing; available: progress, early-stopping"]),
        ({"name": "early-stopping", "patience": 0}, 2, ["callbacks.patience = 0 is not allowed"]),
        ({"name": "checkpoints"}, 2, ["callbacks is not allowed: it needs every"]),
    ],
)
def test_what_is_wrong_with_a_callback_is_one_sentence(
    table: dict[str, Any], code: int, words: list[str], tmp_path: Path
) -> None:
    own_toml(tmp_path, table)
    one_sentence(equipoise_command("run", "run.toml", "--out", "out", cwd=tmp_path), code, *words)


@pytest.mark.parametrize("given", ["early-stopping", ["early-stopping"], {"name": "early-stopping"}])
def test_callbacks_are_tables(given: Any) -> None:
    with pytest.raises(eq.EquipoiseError, match=r"it must be a list of tables with a name, \[\[callbacks\]\]"):
        Experiment.parse(small(callbacks=given))
