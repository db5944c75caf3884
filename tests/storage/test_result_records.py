"""Files of records: what is written is read again, sorted, and no line is lost."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import EquipoiseError
from equipoise.storage.record_checks import check_summary
from equipoise.storage.result_records import Record, add_records, prepare_records_file, read_records
from tests.support.commands import is_one_sentence
from tests.support.finished_runs import finished

COSTS = {"bytes_up": 1, "bytes_down": 1, "gradient_samples": 1, "seconds": 1.0}
SUMMARY = {"metric": "accuracy", "dataset": "digits", "personal": {"accuracy": 0.5}, **COSTS}
CURVES = {"round": [1, 2], "personal.accuracy": [0.25, 0.5], "diagnostics.dual.norm": [None, 3.0]}


def record(algorithm: str = "ditto", seed: int = 0, **more: Any) -> Record:
    settings = {"algorithm.name": algorithm, "data.name": "digits", **more.pop("settings", {})}
    digest = more.pop("digest", f"of {algorithm}")
    return Record(digest, seed, settings, **{"summary": SUMMARY, "curves": CURVES, **more})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=12))
def test_a_file_has_the_last_record_of_every_run_whatever_the_order(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[str, int, float]]
) -> None:
    folder = tmp_path_factory.mktemp("records")
    last = {}
    for name, seed, score in runs:
        summary = {**SUMMARY, "personal": {"accuracy": score}}
        last[name, seed] = record(name, seed, summary=summary)
        add_records(folder / "one-by-one.jsonl", [last[name, seed]])
    add_records(folder / "at-once.jsonl", list(last.values())[::-1])
    one, other = (folder / f"{name}.jsonl" for name in ("one-by-one", "at-once"))
    assert one.read_bytes() == other.read_bytes()
    assert read_records(one) == [last[key] for key in sorted(last)]
    assert sorted(path.name for path in folder.iterdir()) == ["at-once.jsonl", "one-by-one.jsonl"]


def test_a_record_is_a_run_that_can_be_compared_and_drawn(tmp_path: Path) -> None:
    run = record(seed=3).as_run(tmp_path / "r.jsonl")
    assert run.config == {"algorithm.name": "ditto", "data.name": "digits", "seed": 3}
    assert run.summary["algorithm"] == "ditto"
    assert run.summary["personal"] == {"accuracy": 0.5}
    assert run.metrics == [
        {"round": 1, "personal": {"accuracy": 0.25}, "diagnostics": {"dual": {"norm": None}}},
        {"round": 2, "personal": {"accuracy": 0.5}, "diagnostics": {"dual": {"norm": 3.0}}},
    ]


def test_a_record_of_a_later_version_with_another_setting_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    add_records(file, [record()])
    later = record(settings={"algorithm.new": 1})  # the digest is over what differs from defaults, so it is the same
    added = add_records(file, [later, record(settings={"algorithm.new": 2}, digest="another")])
    assert (added.new, added.replaced, added.unchanged) == (1, 1, 0)
    changed = record(settings={"algorithm.new": 3})  # a default that has changed: the same digest, but another run
    assert add_records(file, [changed, later]).new == 1
    assert {r.settings["algorithm.new"] for r in read_records(file)} == {1, 2, 3}


def test_settings_have_their_names_of_today_and_unknown_keys_of_a_record_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    line = json.loads(record(settings={"engine.dtype": "float64"}).line())
    file.write_text(json.dumps({**line, "of a later version": 1}) + "\n")
    assert read_records(file)[0].settings["engine.precision"] == "float64"


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '"x"',
        '{"digest": "a"}',
        '{"digest": "a", "seed": "b", "settings": {}, "failed": "x"}',
        '{"digest": "a", "seed": 0, "settings": {}, "summary": {}}',
        '{"digest": "a", "seed": 0, "settings": {}, "failed": "x", "curves": {"round": [1], "loss": []}}',
        '{"digest": "a", "seed": 0, "settings": {}, "failed": "x", "curves": {"round": 1}}',
        record(seed=True).line(),
        record(settings={"algorithm.name": ["a"]}).line(),
        *(record(summary={k: v for k, v in SUMMARY.items() if k != name}).line() for name in (*COSTS, "metric")),
        record(summary={**SUMMARY, "personal": 3}).line(),
        record(summary={**SUMMARY, "personal": {"accuracy": "high"}}).line(),
        record(summary={**SUMMARY, "unseen": {"personal": 3}}).line(),
        record(summary={**SUMMARY, "unseen": [1]}).line(),
        record(summary={**SUMMARY, "metrics": {"f1": 3}}).line(),
        record(summary={**SUMMARY, "dataset": 3}).line(),
        record(curves={"round": [1], "duals": [1.0], "duals.norm": [2.0]}).line(),
        record(curves={"round": [1], "duals.norm.mean": [1.0], "duals.norm": [2.0]}).line(),
        record(curves={"round": [None], "loss": [1.0]}).line(),
        record(curves={"round": [1], "loss": ["low"]}).line(),
    ],
)
def test_a_damaged_line_is_named_and_the_file_is_kept(line: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    text = record().line() + "\n" + line + "\n"
    file.write_text(text)
    for use in (lambda: read_records(file), lambda: add_records(file, [record(seed=1)])):
        with pytest.raises(EquipoiseError) as caught:
            use()
        is_one_sentence(caught.value, f"line 2 of {file} is not the record of a run")
    assert file.read_text() == text


def test_a_file_must_be_named_as_records_are(tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match=r"name the file FILE\.jsonl"):
        add_records(tmp_path / "r.json", [record()])
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(EquipoiseError, match="is a folder"):
        add_records(tmp_path / "x.jsonl", [record()])
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path / "r.json", "name the file FILE.jsonl"),
        (tmp_path / "x.jsonl", "is a folder"),
        (tmp_path / "runs", "is a folder; name a file of records"),
        (tmp_path / "file" / "r.jsonl", "cannot be written"),
        (tmp_path / ("x" * 300 + ".jsonl"), "cannot be written"),
        (Path("/proc/r.jsonl"), "cannot be written"),
    ):
        with pytest.raises(EquipoiseError) as caught:
            prepare_records_file(path)
        is_one_sentence(caught.value, words)
    prepare_records_file(tmp_path / "new" / "r.jsonl")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(EquipoiseError, match="there is no file"):
        read_records(tmp_path / "none.jsonl")


def test_processes_that_share_a_file_lose_no_record_of_each_other(tmp_path: Path) -> None:
    """Each thread locks the folder through a descriptor of its own, as a process would."""
    file = tmp_path / "r.jsonl"

    def add(first: int) -> None:
        for seed in range(first, first + 20):
            add_records(file, [record(seed=seed)])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add, (0, 20, 40)))
    assert [each.seed for each in read_records(file)] == list(range(60))


@pytest.mark.parametrize(
    "forecast",
    [[], {"unit": 3}, {"personal": 1}, {"weekly": {"mae": "x"}}, {"personal": {"mae": [1.0]}}, {"unseen": 2}],
)
def test_scores_of_forecasts_with_another_form_are_refused(forecast: object) -> None:
    summary = finished("ditto", 0.5).summary
    check_summary({**summary, "forecast": {"unit": "kW", "personal": {"mae": None, "steps": [1.0, None]}}})
    with pytest.raises(ValueError, match="forecast"):
        check_summary({**summary, "forecast": forecast})
