"""Tables that fit the terminal: nothing is cut apart, and what is left out is named."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from equipoise.reporting.comparison import compare
from equipoise.reporting.comparison_table import as_table
from equipoise.reporting.fitted_table import FittedTable
from equipoise.storage.run_index import FinishedRun
from tests.support.finished_runs import finished


def printed(table: FittedTable, width: int) -> list[str]:
    """The lines that are printed, after a check that none is too long."""
    out = io.StringIO()
    Console(file=out, width=width, legacy_windows=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert all(cell_len(line) <= width for line in lines)
    return lines


def realistic() -> list[FinishedRun]:
    runs = []
    for seed in (0, 1, 2):
        for algorithm, lam in (("flame-lp-proj", 0.1), ("fedavg-ft", 10.0)):
            for beta in (0.1, 0.5):
                settings = {
                    "algorithm__lam": lam,
                    "algorithm__personal_lr": 0.05,
                    "data__partition__kind": "dirichlet" if beta == 0.1 else "quantity",
                    "data__partition__beta": beta,
                    "model__hidden": [256, 128] if beta == 0.1 else [64],
                    "participation": 0.1 if beta == 0.1 else 1.0,
                }
                run = finished(algorithm, 0.9 + seed / 100 - beta / 10, seed, **settings)
                run.summary["global"] = run.summary["hybrid"] = run.summary["personal"]
                run.summary["unseen"] = {"personal": {"accuracy": 0.5 + seed / 10}}
                runs.append(run)
    return runs


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("fairness", [False, True])
def test_comparisons_with_long_settings_are_readable_in_any_width(width: int, fairness: bool) -> None:
    rows = compare(realistic())
    lines = printed(as_table(rows, fairness), width)
    text = "\n".join(lines)
    for row in rows:
        assert f"{100 * row['personal']:.2f} ± {100 * row['personal_std']:.2f}" in text  # never wrapped
        assert row["algorithm"] in text
        for setting in row["settings"].replace(", ", ",").split():
            assert setting.split(",")[0] in text
    if width >= 80:  # rows, not blocks
        assert any(line.startswith("algorithm") for line in lines[:2])


def test_at_80_columns_a_plain_comparison_is_one_line_per_row() -> None:
    runs = [finished(name, 0.9 - seed / 10, seed) for name in ("fedavg-ft", "ditto") for seed in (0, 1)]
    lines = printed(as_table(compare(runs)), 80)
    rows = [line for line in lines if line.startswith(("fedavg-ft", "ditto"))]
    assert len(rows) == 2
    assert all(re.search(r"85\.00 ± 7\.07 .* 1\.5$", line) for line in rows)


def test_columns_that_are_left_out_are_named() -> None:
    table = FittedTable(
        ["name", "a", "b", "c"], [["x", "1" * 10, "2" * 10, "3" * 10]], words=["name"], secondary=["b", "a"]
    )
    whole = "\n".join(printed(table, 60))
    assert "not shown" not in whole
    lines = printed(table, 30)
    assert "2" * 10 not in "\n".join(lines)
    assert "1" * 10 in "\n".join(lines)
    assert lines[-1] == "not shown in this width: b"


def test_a_row_becomes_a_block_if_nothing_else_helps() -> None:
    table = FittedTable(["name", "first", "second"], [["x", "12345678 ± 1", "23456789 ± 2"]], words=["name"])
    assert printed(table, 22) == ["x", "  first   12345678 ± 1", "  second  23456789 ± 2"]


def test_settings_go_below_a_row_before_it_becomes_a_block() -> None:
    body = [["x", "lam=1 rounds=100", "12345678 ± 1"], ["yy", "", "2345678 ± 2"]]
    table = FittedTable(["name", "settings", "score"], body, words=["name", "settings"], below="settings")
    assert printed(table, 20) == [
        "name         score",
        "──────────────────",
        "x     12345678 ± 1",
        "  lam=1 rounds=100",
        "yy     2345678 ± 2",
    ]


def test_columns_can_go_to_several_tables() -> None:
    head, line = ["", *(f"column {i}" for i in range(6))], ["row", *(f"{i}.00 ± 0.10 ▲" for i in range(6))]
    lines = printed(FittedTable(head, [line], words=[""], split=True, title="Table"), 40)
    assert lines[0] == "Table"
    rows = [each for each in lines if each.startswith("row")]
    assert len(rows) == 3
    assert [cell for each in rows for cell in re.split(r"\s{2,}", each)[1:]] == line[1:]


def test_brackets_are_text() -> None:
    assert "hidden=[bold]x[/bold]" in "\n".join(printed(FittedTable(["a"], [["hidden=[bold]x[/bold]"]]), 40))


cells = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)


@given(
    st.integers(2, 6).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1, max_size=4)),
    st.integers(30, 120),
    st.booleans(),
)
def test_every_cell_is_printed_whole_whatever_the_width(body: list[list[str]], width: int, split: bool) -> None:
    head = [f"c{i}" for i in range(len(body[0]))]
    text = "\n".join(printed(FittedTable(head, body, words=head[:1], split=split), width))
    for line in body:
        for cell in line:
            assert cell in text


@pytest.mark.parametrize("width", range(40, 90))
def test_rows_with_lines_below_have_the_same_gaps_and_whole_figures(width: int) -> None:
    """A row of short texts would have room for wider gaps than the whole table has."""
    head = ["algorithm", "settings", *(f"column {i}" for i in range(6))]
    body = [
        ["halfway", "lr=0.1 partition.kind=dirichlet", *["0.6927 ± 0.0123"] * 2, *["0.5260"] * 4],
        ["fedrep", "lr=0.5 partition.kind=iid", *["–"] * 2, *["0.5261"] * 4],
    ]
    text = "\n".join(printed(FittedTable(head, body, ("algorithm", "settings"), below="settings"), width))
    assert (text.count("0.5260"), text.count("0.5261")) == (4, 4)
