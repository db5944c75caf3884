"""Comparisons as LaTeX: a table that compiles, with the best figures in bold."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.reporting.latex import as_latex, escape_latex
from equipoise.storage.run_index import FinishedRun
from tests.support.finished_runs import finished


def table(runs: list[FinishedRun], fairness: bool = False) -> list[dict[str, str]]:
    """The rows of the table, by the titles of the columns, after a check of its structure."""
    text = as_latex(runs, fairness)
    for begin, end in ((r"\begin{table}", r"\end{table}"), (r"\begin{tabular}", r"\end{tabular}")):
        assert text.count(begin) == text.count(end) == 1
        assert text.index(begin) < text.index(end)
    assert re.fullmatch(r"[^{}]*", _without_braces(text))
    [columns] = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", text)
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")].rstrip()
    lines = [line.strip() for line in body.splitlines()[1:]]
    assert lines[1] == r"\midrule"
    rows = []
    for line in lines:
        if line != r"\midrule":
            assert line.endswith(r" \\")
            rows.append(re.split(r"(?<!\\) & ", line.removesuffix(r" \\")))
    assert all(len(row) == len(columns) for row in rows)
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def _without_braces(text: str) -> str:
    """What is left when pairs of braces are removed from the inside out; escaped ones do not count."""
    text = text.replace(r"\{", "").replace(r"\}", "")
    while (shorter := re.sub(r"\{[^{}]*\}", "", text)) != text:
        text = shorter
    return text


def test_the_best_of_a_column_is_bold_with_its_spread() -> None:
    runs = [finished("ditto", 0.9, seed) for seed in (0, 1)] + [finished("fedrep", 0.85)]
    ditto, fedrep = table(runs)
    assert ditto[r"personal \%"] == r"$\mathbf{90.00} \pm 0.00$"
    assert fedrep[r"personal \%"] == "$85.00$"
    assert ditto["worst tenth"] == r"$\mathbf{45.00} \pm 0.00$"
    assert fedrep["spread"] == r"$\mathbf{8.50}$"  # lower is better
    assert ditto["seeds"] == "$2$"  # neither is better
    assert ditto[r"global \%"] == fedrep[r"global \%"] == "--"


def test_where_lower_is_better_the_lowest_is_bold() -> None:
    one, two = table([finished("a", 0.5, metric="rmse", higher=False), finished("b", 0.7, metric="rmse", higher=False)])
    assert (one["personal"], two["personal"]) == (r"$\mathbf{0.5000}$", "$0.7000$")
    assert one["worst tenth"] == r"$\mathbf{0.2500}$"


def test_figures_that_look_the_same_are_all_bold() -> None:
    rows = table([finished("a", 0.90001), finished("b", 0.90004), finished("c", 0.899)])
    assert [r"\mathbf" in row[r"personal \%"] for row in rows] == [True, True, False]


def test_figures_are_compared_on_the_same_data_only() -> None:
    runs = [
        finished("a", 0.9, data__partition__kind="iid"),
        finished("a", 0.5, data__partition__kind="dirichlet"),
        finished("b", 0.8, data__partition__kind="iid"),
        finished("b", 0.6, data__partition__kind="dirichlet"),
    ]
    rows = table(runs)
    assert [(row["algorithm"], r"\mathbf" in row[r"personal \%"]) for row in rows] == [
        ("a", True),
        ("b", False),
        ("a", False),
        ("b", True),
    ]
    assert as_latex(runs).count(r"\midrule") == 2


def test_a_figure_without_another_to_compare_it_with_is_not_bold() -> None:
    runs = [finished("a", 0.9), finished("b", 0.9, attack__name="sign-flip"), finished("c", 0.9, kind="global")]
    text = as_latex([runs[1]])
    assert r"\mathbf" not in text
    assert "bold" not in text
    a, c = table([runs[0], runs[2]])
    assert r"\mathbf" not in a[r"personal \%"] + c[r"global \%"]


def test_fairness_has_one_line_per_kind_of_model() -> None:
    rows = table([finished("a", 0.9), finished("b", 0.8, kind="global", loss_variance=0.1)], fairness=True)
    assert [row["model"] for row in rows] == ["personal", "global"]
    assert rows[1]["loss variance"] == r"$\mathbf{0.1000}$"
    assert rows[0]["score"] == r"$\mathbf{90.00}$"


def test_special_characters_are_escaped() -> None:
    assert escape_latex(r"50% & a_b #1 {x} $y ~^\<") == (
        r"50\% \& a\_b \#1 \{x\} \$y \textasciitilde{}\textasciicircum{}\textbackslash{}\textless{}"
    )
    assert escape_latex("ε ± ∞") == r"$\varepsilon$ $\pm$ $\infty$"
    rows = table([finished("mine.py:My_Net", 0.9, model__hidden=[64, 32]), finished("b&c", 0.8, model__hidden=[8])])
    assert rows[0]["algorithm"] == r"mine.py:My\_Net"
    assert rows[0]["settings"] == r"model.hidden={[}64, 32{]}"
    assert rows[1]["algorithm"] == r"b\&c"


@given(st.text(st.characters(codec="ascii"), max_size=30))
def test_no_text_breaks_the_table(text: str) -> None:
    escaped = escape_latex(text)
    plain = re.sub(r"\\(?:[&%$#_{}]|text[a-z]+\{\})", "", escaped).replace("{[}", "").replace("{]}", "")
    assert not set(plain) & set("&%$#_{}~^\\\n\0")


@pytest.mark.parametrize("score", [-0.25, 12345.6])
def test_figures_of_any_size_are_mathematics(score: float) -> None:
    rows = table([finished("a", score, metric="r2"), finished("b", score - 1, metric="r2")])
    assert rows[0]["personal"] == rf"$\mathbf{{{score:.4f}}}$"
