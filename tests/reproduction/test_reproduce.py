"""The papers' tables and figures by name: what is planned was published, and what is printed was run."""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import psutil
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.reproduce_output import _about_marks
from equipoise.reproduction import comparison, runner
from equipoise.reproduction.comparison import ComparisonCell, PaperComparison, fits
from equipoise.reproduction.exhibits import SCALES, exhibits, find, own
from equipoise.reproduction.pieces import Piece
from equipoise.reproduction.runner import Overall, pieces
from equipoise.reproduction.scale_differences import cut_runs, reduced
from equipoise.storage.run_folder import RunFolder, flatten
from tests.support.commands import equipoise_command, small
from tests.support.finished_runs import finished
from tests.support.waiting import start, until

EVERY = exhibits(own())
RUNNABLE = [name for name, exhibit in EVERY.items() if not exhibit.why]


@cache
def planned(name: str, scale: str) -> list[Piece]:
    return pieces(EVERY[name], Path("nowhere"), scale)


def test_the_tables_and_figures_are_those_of_the_papers() -> None:
    """Counted in the papers; a name such as fig4-7 stands for four."""
    found: dict[str, dict[str, set[int]]] = {}
    for exhibit in EVERY.values():
        numbered = re.fullmatch(r"(table|fig)(\d+)(?:-(\d+))?", exhibit.name)
        if numbered is None:
            assert "not in the paper" in exhibit.note
            continue
        kind, first, last = numbered.groups()
        numbers = range(int(first), int(last or first) + 1)
        found.setdefault(exhibit.paper, {}).setdefault(kind, set()).update(numbers)
    up_to = {"flame": (3, 43), "fedeq": (2, 6), "fl-deq": (0, 4), "learn2pfed": (6, 5), "fedreco": (3, 3)}
    for paper, (tables, figures) in up_to.items():
        assert found[paper].get("table", set()) == set(range(1, tables + 1)), paper
        assert found[paper]["fig"] - {7 if paper == "learn2pfed" else 0} == set(range(1, figures + 1)), paper


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_every_published_figure_has_runs_and_every_file_its_time(name: str) -> None:
    exhibit = EVERY[name]
    for scale in SCALES:
        assert {piece.part.name for piece in planned(name, scale)} == {part.name for part in exhibit.parts}, scale
        assert runner.estimate(exhibit, scale) is not None, scale
        for piece in planned(name, scale) if not exhibit.where else ():
            known = runner.cost(exhibit, piece.file, piece.part, scale)
            assert known is not None
            assert known.runs == len(piece.every), (piece.part.name, piece.file, scale)
    configs: dict[str, list[dict[str, Any]]] = {part.name: [] for part in exhibit.parts}
    for piece in planned(name, "paper"):
        tables = [flatten(cell.experiment.tables()) for cell in piece.every]
        # Of the values that are tuned, one is chosen.
        configs[piece.part.name] += [
            {k: v for k, v in t.items() if k not in ("seed", *piece.sweep.tune)} for t in tables
        ]
    for part in exhibit.parts:
        published = exhibit.published("" if exhibit.joint else part.name)
        missing = set(published) - {row.key for row in exhibit.rows}
        assert all(re.search(rf"\b{re.escape(key)}\b", exhibit.lacks) for key in missing), missing
        for row in exhibit.rows:
            figures = published.get(row.key, [])
            assert len(figures) in (0, len(exhibit.columns)), row.key
            for column in exhibit.columns if figures else ():
                if exhibit.joint and column.part != part.name:
                    continue
                mine = [c for c in configs[part.name] if fits(c, {**row.where, **column.where})]
                assert mine, (part.name, row.key, column.key)
                # Seeds of one run, and not several methods under one name.
                assert len({json.dumps(c, sort_keys=True) for c in mine}) == 1


figures = st.floats(-100, 100).map(lambda x: round(x, 3))
spreads = st.none() | st.floats(0, 10).map(lambda x: round(x, 3))


@given(figures, spreads, figures, spreads)
def test_a_mark_stands_where_two_figures_differ_by_more_than_both_spreads(
    ours: float, spread: float | None, paper: float, theirs: float | None
) -> None:
    entry = ComparisonCell(ours, spread, 5, paper, theirs)
    if spread is None and theirs is None:
        assert entry.mark == ""
        return
    apart = abs(ours - paper) > (spread or 0) + (theirs or 0)
    assert entry.mark == ("" if not apart else "▲" if ours > paper else "▼")
    swapped = ComparisonCell(paper, theirs, 5, ours, spread)
    assert (entry.mark, swapped.mark) in (("", ""), ("▲", "▼"), ("▼", "▲"))
    assert ComparisonCell(None, None, 0, paper, theirs).mark == ""


TABLES = {"paper": {"table1": {"local": [[0.5, 0.0]], "ditto": [[1e6, 0.1]]}}}


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder with one small paper of our own."""
    place = tmp_path / "papers"
    (place / "toy" / "paper").mkdir(parents=True)
    sweep = small(
        algorithm=[{"name": "local", "lr": 0.1}, {"name": "ditto", "lr": 0.1}], seed=[0, 1], checkpoint_every=50
    )
    scale = {"smoke": {"rounds": 1, "seed": 0}, "small": {"rounds": 3}, "paper": {"rounds": 150}}
    (place / "toy" / "lines.toml").write_text(tomli_w.dumps({**sweep, "scale": scale}))
    (place / "toy" / "paper" / "tables.toml").write_text(tomli_w.dumps(TABLES["paper"]))
    exhibits: dict[str, Any] = {
        "paper": "Toy: straight lines",
        "exhibit": [
            {
                "name": "table1",
                "title": "Errors",
                "files": ["lines"],
                "parts": ["lines"],
                "figures": "table1",
                "rows": ["local", "ditto"],
                "columns": [{"key": "error", "score": "personal"}],
            },
            {"name": "fig1", "title": "Overview", "why": "a drawing"},
            {"name": "fig2", "title": "Curves", "files": ["lines"], "parts": ["lines"], "plot": "losses"},
        ],
    }
    (place / "toy" / "exhibits.toml").write_text(tomli_w.dumps(exhibits))
    return place


def command(papers: Path, *arguments: object) -> subprocess.CompletedProcess:
    return equipoise_command("reproduce", "--papers", papers, *arguments, cwd=papers.parent)


@pytest.mark.slow
def test_a_paper_of_ones_own_is_listed_run_and_set_beside_its_figures(papers: Path, tmp_path: Path) -> None:
    listed = json.loads(command(papers, "--json").stdout)
    assert [(row["name"], row["status"]) for row in listed] == [
        ("toy-table1", "in full, time not known"),
        ("toy-fig1", "nothing to run"),
        ("toy-fig2", "in full, time not known"),
    ]
    done = command(papers, "toy-table1")
    assert done.returncode == 0, done.stderr
    scores: dict[str, list[float]] = {}
    for summary in sorted((tmp_path / "runs" / "toy" / "lines").glob("*/summary.json")):
        found = json.loads(summary.read_text())
        scores.setdefault(summary.parent.name.split("-")[0], []).append(found["personal"]["rmse"])
    for name, values in scores.items():
        assert f"{mean(values):.4f} ± {stdev(values):.4f}" in done.stdout, name
    assert "(0.5000 ± 0.0000)" in done.stdout
    assert "(1000000.0000 ± 0.1000)" in done.stdout
    assert "(1000000.0000 ± 0.1000) ▼" not in done.stdout  # the paper has 150 rounds
    assert "No figure is marked ▲ or ▼: their runs have other sizes or settings than the paper's" in done.stdout
    assert "rounds 3 (150)" in done.stdout
    kept = json.loads((tmp_path / "runs" / "toy" / "paper.json").read_text())["toy-table1 (small)"]
    assert kept["notes"].startswith("scale small (in parentheses: paper): rounds 3 (150); figures of runs that are")
    [table] = kept["tables"]
    assert table["entries"][1][0]["ours"] == pytest.approx(mean(scores["ditto"]))
    # With other settings it is another experiment, whose figures do not take the place of these.
    command(papers, "toy-table1", "--set", "rounds=1")
    again = json.loads((tmp_path / "runs" / "toy" / "paper.json").read_text())
    assert again == {"toy-table1 (small)": kept}
    # The figure asks for the same runs, which are there.
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").glob("toy/lines/*/summary.json")}
    done = command(papers, "toy-fig2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "toy" / "fig2-lines-small.png").stat().st_size > 1000
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").glob("toy/lines/*/summary.json")} == before
    # And the page has the table with the same figures.
    done = equipoise_command("report", "runs/toy", "--out", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "toy-table1 (small): Errors" in page
    assert f"{mean(scores['ditto']):.4f} ± {stdev(scores['ditto']):.4f}" in page


def test_seeds_and_settings_from_the_command_line_come_on_top(papers: Path) -> None:
    planned = pieces(find("toy-table1", papers), papers.parent / "runs", "small", seeds=4, sets=["rounds=7"])
    [piece] = planned
    assert {(c.seed, c.experiment.schedule.rounds) for c in piece.every} == {(k, 7) for k in range(4)}
    assert {c.experiment.schedule.checkpoint_every for c in piece.every} == {1}
    assert reduced(find("toy-table1", papers), planned) == "rounds 7 (150), seeds 4 (2)"
    assert reduced(find("toy-table1", papers), pieces(find("toy-table1", papers), papers, "paper")) == ""


def test_figures_are_marked_if_the_runs_are_the_papers_apart_from_seeds(papers: Path) -> None:
    exhibit = find("toy-table1", papers)
    out = papers.parent / "runs"
    small = pieces(exhibit, out, "small")
    assert cut_runs(exhibit, small) == {cell.folder(small[0].folder) for cell in small[0].every}
    for more in ({}, {"seeds": 1}, {"seeds": 9}, {"sets": ["evaluate_every=5"]}, {"sets": ["engine.workers=1"]}):
        assert cut_runs(exhibit, pieces(exhibit, out, "paper", **more)) == set(), more
    for changed in ("algorithm.lr=0.2", "data.clients=2", "rounds=149"):
        assert cut_runs(exhibit, pieces(exhibit, out, "paper", sets=[changed])), changed


def test_only_figures_of_cut_runs_lose_their_marks(papers: Path) -> None:
    exhibit = find("toy-table1", papers)
    runs = [
        replace(finished(name, 1.0 + seed, seed, metric="rmse", higher=False), path=Path(f"{name}-{seed}"))
        for name in ("local", "ditto")
        for seed in (0, 1)
    ]
    [whole] = comparison.compare_with_paper(exhibit, {"lines": runs}, "paper")
    assert [[entry.mark for entry in row] for row in whole.entries] == [["▲"], ["▼"]]
    [some] = comparison.compare_with_paper(exhibit, {"lines": runs}, "small", {Path("ditto-1")})
    assert [[entry.mark for entry in row] for row in some.entries] == [["▲"], [""]]
    assert (some.marked(), some.filled(), some.cut()) == (1, 2, 1)
    text = _about_marks([some])
    assert "1 of 1 figures" in text
    assert "Not marked: 1 of 2 figures, because their runs have other sizes" in text


def entries(out: str) -> list[Any]:
    return [[entry["ours"] for entry in row] for table in json.loads(out)["tables"] for row in table["entries"]]


# Every run waits in its seventh round, between its line and its checkpoint, until it is killed. Workers are new
# processes, which read the script again.
WAITING = """
import threading
from equipoise.engine.run import Run

log = Run.log

def log_and_wait(self, line, timing):
    log(self, line, timing)
    if line["round"] == 7:
        threading.Event().wait()

Run.log = log_and_wait
if __name__ == "__main__":
    from equipoise.cli.app import main
    main()
"""


@pytest.mark.slow
def test_killing_it_loses_a_round_at_most_and_changes_no_result(papers: Path) -> None:
    arguments = ["toy-table1", "--scale", "paper", "--json", "--quiet"]
    whole = command(papers, *arguments, "--out", "whole")
    assert whole.returncode == 0, whole.stderr
    script = papers.parent / "waiting.py"
    script.write_text(WAITING)
    slow = [sys.executable, script, "reproduce", "--papers", papers, *arguments, "--out", "killed", "--jobs", "2"]
    process = start(slow, cwd=papers.parent)
    runs = (papers.parent / "killed" / "toy" / "lines").glob
    try:
        until(lambda: [p.read_text().count("\n") for p in runs("*/timings.jsonl")] == [7, 7], process)
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        for each in (*family, process):
            each.kill()
        process.wait()
        psutil.wait_procs(family)
    begun = [path.parent for path in runs("*/timings.jsonl")]
    assert len(begun) == 2
    for folder in begun:
        assert RunFolder(folder).read_metrics()[-1]["round"] == 7
        assert max(int(p.stem.split("-")[1]) for p in (folder / "checkpoint").glob("round-*.json")) == 6
    again = command(papers, *arguments, "--out", "killed")
    assert again.returncode == 0, again.stderr
    assert entries(again.stdout) == entries(whole.stdout)


def test_progress_counts_rounds_of_runs_that_are_not_done_yet(papers: Path) -> None:
    [piece] = pieces(find("toy-table1", papers), papers.parent / "runs", "small")
    overall = Overall([piece])
    assert (overall.total, overall.look()) == (4 * 3, 0)
    first, second, *_ = piece.every
    folder = first.folder(piece.folder)
    folder.mkdir(parents=True)
    (folder / "timings.jsonl").write_text("{}\n{}\n")
    assert overall.look() == 2
    (folder / "summary.json").write_text("{}")
    failed = second.folder(piece.folder)
    failed.mkdir()
    (failed / "failed.json").write_text("{}")
    assert overall.look() == 6
    assert (len(overall.over), overall.count) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["toy-tabel1"], "there is no exhibit 'toy-tabel1'; did you mean 'toy-table1'?"),
        (["toy-fig1"], "toy-fig1 (Overview) cannot be run: a drawing"),
        (["toy-table1", "--only", "mnist"], "toy-table1 has no part 'mnist'; available: lines"),
        (["--seeds", "3"], "--seeds is for one table or figure"),
        (["toy-table1", "--set", "algorithm.lt=1"], "unknown setting algorithm.lt"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(papers: Path, arguments: list[str], words: str) -> None:
    done = command(papers, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (papers.parent / "runs").exists()


def test_a_folder_without_papers_and_a_file_that_is_none_are_told(papers: Path, tmp_path: Path) -> None:
    done = equipoise_command("reproduce", "--papers", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere holds no papers" in done.stderr
    (papers / "toy" / "exhibits.toml").write_text('paper = "x"\n[[exhibit]]\nnam = "table1"\n')
    other = papers.rename(papers.with_name("others"))  # files are read once
    done = equipoise_command("reproduce", "--papers", other, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a file of exhibits" in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"figures": "tabel1"}, "figures = 'tabel1' is not a section of paper/tables.toml"),
        ({"relative": "locl"}, "relative = 'locl' is not one of its rows; did you mean 'local'?"),
        ({"target": {"small": 0.1}}, "target needs a score for each of smoke, small, paper"),
        ({"parts": []}, "it has neither parts to run nor a reason"),
        ({"columns": [{"key": "error", "part": "line"}]}, "has no part 'line'; did you mean 'lines'?"),
    ],
)
def test_what_would_only_be_noticed_at_the_end_is_said_at_once(
    papers: Path, change: dict[str, Any], words: str
) -> None:
    file = papers / "toy" / "exhibits.toml"
    tables = tomllib.loads(file.read_text())
    tables["exhibit"][0] |= change
    file.write_text(tomli_w.dumps(tables))
    done = command(papers)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.slow
def test_a_joint_table_keeps_the_columns_of_parts_that_were_not_asked_for_again(papers: Path, tmp_path: Path) -> None:
    file = papers / "toy" / "exhibits.toml"
    tables = tomllib.loads(file.read_text())
    parts = [
        {"name": name, "files": ["lines"], "set": [f"data.samples={n}"]} for name, n in (("few", 12), ("many", 20))
    ]
    columns = [{"key": part["name"], "part": part["name"]} for part in parts]
    tables["exhibit"] = [{"name": "table2", "title": "Both", "parts": parts, "rows": ["local"], "columns": columns}]
    file.write_text(tomli_w.dumps(tables))
    for more in ([], ["--only", "few"]):
        done = command(papers, "toy-table2", "--scale", "smoke", "--json", *more)
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert shown["tables"][0]["columns"] == (["few"] if more else ["few", "many"])
        assert len(shown["runs"]["few"]) == 2
    kept = json.loads((tmp_path / "runs" / "toy" / "paper.json").read_text())["toy-table2 (smoke)"]
    assert kept["tables"][0]["columns"] == ["few", "many"]
    plan = json.loads(command(papers, "toy-table2", "--scale", "smoke", "--plan", "--json").stdout)
    assert [(row["part"], row["runs"], row["done"]) for row in plan] == [("few", 2, 2), ("many", 2, 2)]


@pytest.mark.slow
def test_with_tuning_the_plan_is_what_will_have_been_run(papers: Path) -> None:
    file = papers / "toy" / "lines.toml"
    tables = tomllib.loads(file.read_text())
    tables |= {"algorithm": {"name": "ditto", "lr": [0.1, 0.05, 0.01]}, "sweep": {"tune": ["algorithm.lr"]}}
    file.write_text(tomli_w.dumps(tables))
    runs = papers.parent / "runs"
    [piece] = pieces(find("toy-table1", papers), runs, "small")
    overall = Overall([piece])
    assert overall.count == 3 + 1  # three trials with the first seed, and the best with the second
    done = command(papers, "toy-fig2")
    assert done.returncode == 0, done.stderr
    assert overall.look() == overall.total
    assert len(overall.over) == overall.count == len(list((runs / "toy" / "lines").glob("*/summary.json")))


def test_data_that_are_missing_are_named_with_what_can_be_run_without_them(tmp_path: Path) -> None:
    done = equipoise_command("reproduce", "flame-table3", cwd=tmp_path)
    assert done.returncode == 2
    assert "flame-table3 needs data that are not in" in done.stderr
    assert "mnist" in done.stderr
    assert "without them: --only digits-by-writer" in done.stderr


def test_figures_relative_to_a_row_are_divided_ours_by_ours_and_theirs_by_theirs() -> None:
    body = [
        (ComparisonCell(10.0, 1.0, 2, 4.0),),
        (ComparisonCell(5.0, None, 1, 3.0),),
        (ComparisonCell(None, None, 0, 2.0),),
    ]
    divided = [row[0] for row in comparison._divided(body, 0)]
    assert [(e.ours, e.paper, e.spread) for e in divided] == [(1.0, 1.0, 0.1), (0.5, 0.75, None), (None, 0.5, None)]


def test_a_table_as_text_has_both_figures() -> None:
    table = PaperComparison("t", "%", ("a",), ("b",), ((ComparisonCell(91.234, 0.5, 5, 93.0, 0.1),),))
    assert table.text(table.entries[0][0]) == "91.23 ± 0.50 (93.00 ± 0.10) ▼"
    assert (table.marked(), table.filled()) == (1, 1)
