"""A run that goes back to an older checkpoint ends as if it had stopped there."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import equipoise as eq
from equipoise.callbacks.callback_list import CallbackList
from equipoise.distributed.ranks import Ranks
from equipoise.engine.assembly import start_or_resume
from equipoise.engine.checkpoint_manifest import digest_of
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError, RunFailed
from tests.support.commands import SMALL, equipoise_command, one_sentence
from tests.support.odd_models import CLIENTS, module
from tests.support.problems import registered, simulation
from tests.support.process_runs import cases, run_case
from tests.support.run_bytes import assert_same

CASES = cases()
SOME = [
    *(
        "fedavg threads",
        "ditto threads",
        "flame threads",
        "learn2pfed threads",
        "learn2pfed-joint threads",
        "ditto stacked",
        "flame stacked",
    ),
    *("flame local", "fedavg central", "flame central", "statistics", "unseen", "callbacks", "memory"),
]


@pytest.mark.parametrize("case", SOME)
def test_the_same_bytes_as_without(case: str, tmp_path: Path) -> None:
    rounds: dict[str, Any] = {"rounds": 6, "checkpoint_every": 1}
    whole = run_case(CASES[case], tmp_path / "run", Ranks(), **rounds)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    again = run_case(CASES[case], tmp_path / "run", Ranks(), new=False, back=2, **rounds)
    assert again.done == whole.done
    assert_same(tmp_path / "whole", tmp_path / "run")


def run_in(folder: Path, new: bool = False, rounds: int = 6, **more: Any) -> Simulation:
    more = {"mode": "stacked", "checkpoint_every": 1, **more}
    return simulation(registered("ditto"), folder=folder, rounds=rounds, new=new, **more)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.stem[6:]) for path in (folder / "checkpoint").glob("round-*.json"))


def test_newer_checkpoints_go_with_the_next_one(tmp_path: Path) -> None:
    run_in(tmp_path / "run", new=True).run()
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert checkpoints(tmp_path / "run") == [4, 5, 6]
    run = run_in(tmp_path / "run")
    run.resume(2)
    assert run.done == 4
    assert not (tmp_path / "run" / "summary.json").exists()
    assert len(run.lines) == 4
    assert checkpoints(tmp_path / "run") == [4, 5, 6]
    run.advance()
    run.close()
    assert checkpoints(tmp_path / "run") == [4, 5]
    more = run_in(tmp_path / "run")
    more.resume()
    assert more.done == 5
    more.run()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == whole


def test_one_that_is_killed_before_its_next_checkpoint_does_not_jump_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in(tmp_path / "run", new=True).run()
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    first = run_in(tmp_path / "run")
    first.resume(2)
    first.close()
    second = run_in(tmp_path / "run")
    told: list[str] = []
    monkeypatch.setattr(second.callbacks, "on_message", told.append)
    second.resume()
    assert second.done == 4
    assert [text.split(": ")[1].split(";")[0] for text in told] == [
        "metrics.jsonl is shorter than at that checkpoint"
    ] * 2
    second.run()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == whole


def test_too_few_checkpoints(tmp_path: Path) -> None:
    run_in(tmp_path / "run", new=True).run()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(EquipoiseError, match=r"has those of rounds 6, 5, 4, so the most is --back 2"):
        run_in(tmp_path / "run").resume(3)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "run" / "summary.json").exists()
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(EquipoiseError, match=r"there is no checkpoint in .* to go back to"):
        run_in(tmp_path / "run").resume(1)


def test_damaged_checkpoints_do_not_count(tmp_path: Path) -> None:
    run_in(tmp_path / "run", new=True).run()
    (tmp_path / "run" / "checkpoint" / "round-000005.json").write_text("{}")
    run = run_in(tmp_path / "run")
    run.resume(1)
    assert run.done == 4
    run.close()


def test_as_many_are_kept_as_the_setting_says_and_it_may_change(tmp_path: Path) -> None:
    train = {"head": None, "out": tmp_path / "run", "checkpoint_every": 1}
    eq.train(module(), CLIENTS, eq.FedAvg(), rounds=4, keep_checkpoints=2, **train)
    assert checkpoints(tmp_path / "run") == [3, 4]
    eq.train(module(), CLIENTS, eq.FedAvg(), rounds=9, keep_checkpoints=5, resume=True, **train)
    assert checkpoints(tmp_path / "run") == [5, 6, 7, 8, 9]
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    eq.train(module(), CLIENTS, eq.FedAvg(), rounds=9, keep_checkpoints=5, resume=True, back=4, **train)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(EquipoiseError, match="--back 1 goes back in a run that is resumed; add --resume"):
        eq.train(module(), CLIENTS, eq.FedAvg(), rounds=9, back=1, **train)
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(EquipoiseError, match="the number of checkpoints to go back"):
            eq.train(module(), CLIENTS, eq.FedAvg(), rounds=9, back=wrong, resume=True, **train)
    with pytest.raises(EquipoiseError, match="keep_checkpoints"):
        eq.train(module(), CLIENTS, eq.FedAvg(), rounds=9, keep_checkpoints=1, resume=True, **train)


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=4, name="ditto"))
    run = lambda *a: equipoise_command("run", "small.toml", "--out", "run", *a, cwd=tmp_path)  # noqa: E731
    assert run("--quiet", "--set", "checkpoint_every=1").returncode == 0
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    one_sentence(run("--back", "1"), 2, "--back 1 goes back in a run that is resumed; add --resume")
    one_sentence(run("--resume", "--back", "7"), 2, "rounds 4, 3, 2, so the most is --back 2")
    for more in ((), ("--processes", "2")):
        again = run("--resume", "--back", "2", "--set", "checkpoint_every=1", *more)
        assert again.returncode == 0, again.stderr
        assert more or "goes back to its checkpoint of round 2" in " ".join(again.stderr.split())
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == whole
        shutil.rmtree(tmp_path / "run")
        assert run("--quiet", "--set", "checkpoint_every=1").returncode == 0
    assert len(whole.splitlines()) == 4


def test_a_restart_by_torchrun_does_not_go_back_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(tmp_path / "run", new=True).run()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = run_in(tmp_path / "run")
    asked: list[int] = []
    monkeypatch.setattr(run, "resume", asked.append)
    monkeypatch.setattr(run, "run", lambda: None)
    start_or_resume(run, True, 2)
    run.close()
    assert asked == [0]


def test_a_model_that_went_bad_names_the_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path / "run", new=True, rounds=5)
    for _ in range(3):
        run.advance()
    train = run.executor.train

    def spoilt(*given: Any) -> Any:
        for result in train(*given):
            yield type(result)(**{**vars(result), "finite": False})

    monkeypatch.setattr(run.executor, "train", spoilt)
    with pytest.raises(
        RunFailed, match=r"^round 4: every client.*suspect is round 3.* and --resume --back 1 continues from round 2$"
    ):
        run.advance()
    run.close()


# Logs


def resumed(folder: Path, back: int = 0, **more: Any) -> tuple[Simulation, list[str]]:
    told: list[str] = []
    run = run_in(folder, checkpoint_every=2, **more)
    run.callbacks = CallbackList([])
    run.callbacks.on_message = told.append  # type: ignore[method-assign]
    run.resume(back)
    return run, told


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    run_in(tmp_path / "run", new=True, checkpoint_every=2).run()
    return tmp_path / "run"


def change_digit(log: Path, round: int) -> None:
    lines = log.read_text().splitlines(keepends=True)
    line = lines[round - 1]
    at = max(k for k, c in enumerate(line) if c.isdigit())
    lines[round - 1] = line[:at] + str((int(line[at]) + 1) % 10) + line[at + 1 :]
    log.write_text("".join(lines))


def test_a_changed_digit_in_the_metrics_is_noticed(finished: Path) -> None:
    whole = (finished / "metrics.jsonl").read_bytes()
    change_digit(finished / "metrics.jsonl", 5)
    run, told = resumed(finished)
    assert run.done == 4
    assert told == [
        "the checkpoint round-000006.json cannot be used: metrics.jsonl has other content than at that checkpoint; the "
        "one before is used"
    ]
    run.run()
    assert (finished / "metrics.jsonl").read_bytes() == whole
    change_digit(finished / "metrics.jsonl", 1)
    with pytest.raises(EquipoiseError, match=r"cannot be resumed: metrics\.jsonl has other content than at that check"):
        resumed(finished)
    assert (finished / "summary.json").exists()


@pytest.mark.parametrize("damage", ["missing", "shorter", "changed"])
def test_timings_are_no_result(damage: str, finished: Path) -> None:
    timings, whole = finished / "timings.jsonl", (finished / "metrics.jsonl").read_bytes()
    if damage == "missing":
        timings.unlink()
    elif damage == "shorter":
        timings.write_bytes(timings.read_bytes()[:50])
    else:
        change_digit(timings, 1)
    run, told = resumed(finished, back=1)
    run.run()
    assert (finished / "metrics.jsonl").read_bytes() == whole
    assert any(text.startswith("timings.jsonl ") and "a new one begins with round 5" in text for text in told)
    assert [json.loads(line)["round"] for line in timings.read_text().splitlines()] == [5, 6]
    assert (finished / "timings-1.jsonl").exists() == (damage != "missing")


def test_checkpoints_without_digests_of_logs_are_used(finished: Path) -> None:
    path = finished / "checkpoint" / "round-000006.json"
    content = json.loads(path.read_text())
    del content["digest"], content["facts"]["log_digests"]
    path.write_text(json.dumps({**content, "digest": digest_of(content)}))
    run, told = resumed(finished)
    run.close()
    assert run.done == 6
    assert told == []


def test_a_run_without_any_checkpoint_says_that_it_starts_over(finished: Path, tmp_path: Path) -> None:
    whole = (finished / "metrics.jsonl").read_bytes()
    for path in (finished / "checkpoint").glob("round-*.json"):
        path.unlink()
    run, told = resumed(finished)
    assert told == [f"there is no usable checkpoint in {finished / 'checkpoint'}; the run starts from its beginning"]
    run.run()
    assert (finished / "metrics.jsonl").read_bytes() == whole


def test_a_new_run_with_resume_says_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        eq.train(module(), CLIENTS, eq.FedAvg(), head=None, rounds=1, out=tmp_path / "run", resume=True)
    assert not any("checkpoint" in str(warning.message) for warning in caught)
