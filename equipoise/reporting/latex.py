"""Comparisons of runs as LaTeX tables with booktabs, the best figures in bold."""

import re
from collections.abc import Sequence

from equipoise.reporting.comparison import compare, problem
from equipoise.reporting.comparison_table import WORDS, cells, note
from equipoise.storage.model_kinds import KINDS
from equipoise.storage.run_index import FinishedRun, grouped, higher_is_better

_BY_METRIC = (*KINDS, "pooled", "unseen", "score", "worst", "best", "worst tenth")
"""Columns in which the metric decides whether higher or lower is better."""
_LOWER = ("spread", "sent MB", "variance", "Gini", "loss variance")
"""Columns in which lower is always better; in those that are in neither list nothing is bold."""

_FIGURE = re.compile(r"(-?\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?")
_SPECIAL = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''"},
    **{"[": "{[}", "]": "{]}"},  # after \\ a bracket would be an argument
    **{"±": r"$\pm$", "∞": r"$\infty$", "ε": r"$\varepsilon$", "δ": r"$\delta$", "×": r"$\times$", "–": "--"},
    "…": r"\ldots{}",
}


def escape_latex(text: str) -> str:
    """Return text in which no character has a meaning for LaTeX."""
    return "".join(_SPECIAL.get(c, c if c.isprintable() else " ") for c in text)


def as_latex(runs: list[FinishedRun], fairness: bool = False) -> str:
    """Return a comparison of runs as a LaTeX table.

    Figures are compared among rows with the same data, attack, privacy and metric; the best one of a column is bold,
    and so are figures that look the same as it.

    Args:
        runs: the runs; those that differ only in the seed are one row.
        fairness: whether to show how evenly scores spread over clients.
    """
    rows, firsts = compare(runs), [group[0] for group in grouped(runs)]
    head, body = cells(rows, fairness)
    # With `fairness` there is one line per kind of model.
    owners = (
        [i for i, row in enumerate(rows) for kind in KINDS if row[kind] is not None] if fairness else range(len(rows))
    )
    problems = [problem(firsts[i]) for i in owners]
    higher = [higher_is_better(firsts[i].summary) for i in owners]
    shown = [[escape_latex(cell) for cell in line] for line in body]
    sections = [[k for k, one in enumerate(problems) if one == each] for each in dict.fromkeys(problems)]
    for at, title in enumerate(head):
        if title in WORDS:
            continue
        for members in sections:
            best = _best([body[k][at] for k in members], _higher(title, higher[members[0]]))
            for k, bold in zip(members, best, strict=True):
                shown[k][at] = _figure(body[k][at], bold)
    columns = "".join("l" if title in WORDS else "r" for title in head)
    caption = escape_latex(note(rows, fairness)) + (". Best figures in bold." if _any_bold(shown) else ".")
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        f"    {_line([escape_latex(title) for title in head])}",
    ]
    for members in sections:
        lines += [r"    \midrule", *(f"    {_line(shown[k])}" for k in members)]
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"])


def _line(texts: Sequence[str]) -> str:
    return " & ".join(texts) + r" \\"


def _any_bold(shown: Sequence[Sequence[str]]) -> bool:
    return any(r"\mathbf" in cell for line in shown for cell in line)


def _higher(title: str, higher: bool) -> bool | None:
    """Tell whether higher figures are better in a column; None if neither is."""
    name = title.removesuffix(" %")
    return higher if name in _BY_METRIC else False if name in _LOWER else None


def _best(texts: Sequence[str], higher: bool | None) -> list[bool]:
    """Tell which figures are the best; none are if there are no two to compare."""
    values = [float(match[1]) if (match := _FIGURE.fullmatch(text)) else None for text in texts]
    known = [value for value in values if value is not None]
    if higher is None or len(known) < 2:
        return [False] * len(texts)
    best = max(known) if higher else min(known)
    return [value == best for value in values]


def _figure(text: str, bold: bool) -> str:
    match = _FIGURE.fullmatch(text)
    if match is None:
        return escape_latex(text)
    value = rf"\mathbf{{{match[1]}}}" if bold else match[1]
    return f"${value}$" if match[2] is None else rf"${value} \pm {match[2]}$"
