"""Recorded results of a paper: shown without running anything, and not repeated."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import tomli_w

from equipoise.errors import EquipoiseError
from equipoise.reproduction.documents import fill
from equipoise.reproduction.exhibits import exhibits, find, own
from equipoise.reproduction.published import count_published, published_pieces, published_runs, record_files
from equipoise.storage.result_records import add_records, read_records
from tests.support.commands import equipoise_command, one_sentence, small

RATES = [0.1, 0.05]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A paper with a table, a curve and a tuned sweep, and the records of its runs at the scale small."""
    place = tmp_path_factory.mktemp("published") / "papers"
    (place / "toy" / "paper").mkdir(parents=True)
    sweep = small(algorithm=[{"name": "local", "lr": 0.1}, {"name": "ditto", "lr": RATES}], seed=[0, 1])
    sweep |= {"sweep": {"tune": ["algorithm.lr"], "tune_seed": 9, "tune_rounds": 2}}
    scale = {"smoke": {"rounds": 1, "seed": 0}, "small": {"rounds": 3}, "paper": {"rounds": 150}}
    (place / "toy" / "lines.toml").write_text(tomli_w.dumps({**sweep, "scale": scale}))
    (place / "toy" / "paper" / "tables.toml").write_text(
        tomli_w.dumps({"table1": {"local": [[0.5, 0.0]], "ditto": [[1e6, 0.1]]}})
    )
    common = {"files": ["lines"], "parts": ["lines"]}
    table = {"rows": ["local", "ditto"], "columns": [{"key": "error", "score": "personal"}], "figures": "table1"}
    found: dict[str, Any] = {
        "paper": "Toy: straight lines",
        "exhibit": [
            {"name": "table1", "title": "Errors", **common, **table},
            {"name": "fig2", "title": "Curves", **common, "plot": "scores"},
            {"name": "fig3", "title": "States", **common, "plot": "learned"},
        ],
    }
    (place / "toy" / "exhibits.toml").write_text(tomli_w.dumps(found))
    file = place / "toy" / "lines.toml"
    words = ["--out", "runs", "--record", place / "toy" / "results" / "lines.jsonl"]
    done = equipoise_command("sweep", file, *words, cwd=place.parent)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def papers(whole: Path, tmp_path: Path) -> Path:
    """The papers without the run folders."""
    return Path(shutil.copytree(whole, tmp_path / "papers"))


def command(papers: Path, *arguments: object) -> subprocess.CompletedProcess:
    return equipoise_command("reproduce", "--papers", papers, *arguments, cwd=papers.parent)


def errors(papers: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for record in read_records(papers / "toy" / "results" / "lines.jsonl"):
        if not record.trial:
            found.setdefault(record.settings["algorithm.name"], []).append(record.summary["personal"]["rmse"])
    return found


def test_published_figures_are_those_of_the_records_beside_the_papers(papers: Path, tmp_path: Path) -> None:
    done = command(papers, "toy-table1", "--published")
    assert done.returncode == 0, done.stderr
    for values in errors(papers).values():
        assert len(values) == 2
        assert f"{mean(values):.4f} ± {stdev(values):.4f}" in done.stdout
    assert "(0.5000 ± 0.0000)" in done.stdout
    assert "rounds 3 (150)" in done.stdout
    assert "Recorded results of 4 runs, 2 seeds per figure, made by version" in done.stdout
    assert "nothing was run" in done.stdout
    assert not (tmp_path / "runs").exists()
    shown = json.loads(command(papers, "toy-table1", "--published", "--json", "--seeds", "1").stdout)
    assert list(shown) == ["small"]
    [table] = shown["small"]["tables"]
    assert [[entry["seeds"] for entry in row] for row in table["entries"]] == [[1], [1]]


def test_curves_are_drawn_from_records_and_states_are_not(papers: Path, tmp_path: Path) -> None:
    done = command(papers, "toy-fig2", "--published", "--out", "pictures")
    assert done.returncode == 0, done.stderr
    picture = tmp_path / "pictures" / "toy" / "fig2-lines-small-published.png"
    assert f"Picture: {picture.relative_to(tmp_path)}" in done.stdout
    assert picture.stat().st_size > 1000
    done = command(papers, "toy-fig3", "--published")
    assert done.returncode == 0, done.stderr
    assert "Its picture needs the runs themselves: equipoise reproduce toy-fig3" in done.stdout


def test_the_list_says_what_is_recorded(papers: Path) -> None:
    listed = json.loads(command(papers, "--json").stdout)
    assert [row["name"] for row in listed] == ["toy-table1", "toy-fig2", "toy-fig3"]
    assert all(row["published"] == {"small": 4} for row in listed)
    assert "small: 4 runs" in command(papers).stdout
    shutil.rmtree(papers / "toy" / "results")
    assert "published" not in command(papers).stdout


def test_of_a_tuned_file_the_chosen_runs_are_shown_whatever_else_is_no_trial(papers: Path) -> None:
    file = papers / "toy" / "results" / "lines.jsonl"
    exhibit = find("toy-table1", papers)
    before = [run.path.name for run in published_runs(published_pieces(exhibit, "small"))["lines"]]
    assert len(before) == 4
    chosen = [r for r in read_records(file) if r.settings["algorithm.name"] == "ditto" and not r.trial]
    [other] = {0.1, 0.05} - {record.settings["algorithm.lr"] for record in chosen}
    add_records(file, [replace(r, digest="x", settings={**r.settings, "algorithm.lr": other}) for r in chosen])
    assert [run.path.name for run in published_runs(published_pieces(exhibit, "small"))["lines"]] == before


def test_what_is_not_recorded_is_said(papers: Path) -> None:
    one_sentence(
        command(papers, "toy-table1", "--published", "--scale", "paper"),
        *(2, "no results are recorded for toy-table1 at the scale paper; run it with `equipoise reproduce toy-table1`"),
    )
    one_sentence(command(papers, "toy-table1", "--published", "--set", "rounds=3"), 2, "--published runs nothing")
    one_sentence(command(papers, "--published"), 2, "--published is for one table or figure")
    shutil.rmtree(papers / "toy" / "results")
    one_sentence(command(papers, "toy-table1", "--published"), 2, "no results are recorded for toy-table1;")


@pytest.mark.slow
def test_continued_reproductions_run_only_what_is_not_recorded(papers: Path, tmp_path: Path) -> None:
    file = papers / "toy" / "results" / "lines.jsonl"
    plan = json.loads(command(papers, "toy-table1", "--continue", "--plan", "--json").stdout)
    assert [(row["runs"], row["done"]) for row in plan] == [(7, 7)]  # three trials, four runs
    done = command(papers, "toy-table1", "--continue")
    assert done.returncode == 0, done.stderr
    assert "7 of 7 runs are recorded (made by version" in done.stdout
    assert list((tmp_path / "runs").glob("*/*/*/summary.json")) == []
    for values in errors(papers).values():
        assert f"{mean(values):.4f} ± {stdev(values):.4f}" in done.stdout
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["seed"] != 1))
    done = command(papers, "toy-table1", "--continue")
    assert "5 of 7 runs are recorded" in done.stdout
    assert len(list((tmp_path / "runs").glob("toy/lines/*/summary.json"))) == 2
    other = command(papers, "toy-table1", "--out", "fresh")
    assert "recorded" not in other.stdout
    assert len(list((tmp_path / "fresh").glob("toy/lines/*/summary.json"))) == 7
    assert [line for line in done.stdout.splitlines() if "±" in line] == [
        line for line in other.stdout.splitlines() if "±" in line
    ]


def test_a_document_shows_the_recorded_exhibit(papers: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- exhibit: toy-table1 small -->\n<!-- end -->\n")
    assert fill([page], papers) == [page]
    values = errors(papers)["local"]
    assert f"| local | {mean(values):.4f} ± {stdev(values):.4f} (0.5000 ± 0.0000) |" in page.read_text()
    page.write_text("<!-- exhibit: toy-table1 paper -->\n<!-- end -->\n")
    with pytest.raises(EquipoiseError, match="no table of toy-table1 is recorded at the scale paper"):
        fill([page], papers)


def test_a_run_with_another_setting_is_not_taken_from_records(papers: Path) -> None:
    plan = json.loads(
        command(papers, "toy-table1", "--continue", "--plan", "--json", "--set", "algorithm.epochs=2").stdout
    )
    assert plan[0]["done"] == 0


def test_records_of_the_package_that_are_listed_are_shown() -> None:
    for exhibit in (each for each in exhibits(own()).values() if each.parts and record_files(each)):
        for scale, number in count_published(exhibit).items():
            runs = published_runs(published_pieces(exhibit, scale))
            assert sum(map(len, runs.values())) == number > 0, (exhibit.id, scale)
