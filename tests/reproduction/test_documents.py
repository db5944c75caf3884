"""Tables and plots of documents: made from recorded results, and never out of date."""

from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import EquipoiseError
from equipoise.reproduction.documents import fill, filled, main
from equipoise.reproduction.exhibits import own
from equipoise.reproduction.result_views import View
from equipoise.reproduction.view_figures import curves_of, field_of, table_of
from equipoise.storage.result_records import Record, add_records
from tests.support.commands import ROOT, is_one_sentence


def record(method: str, seed: int, score: float, lr: float = 0.1, **more: Any) -> Record:
    settings = {"algorithm.name": method, "algorithm.lr": lr, "data.name": "digits", **more.pop("settings", {})}
    personal = {"accuracy": score, "accuracy_pooled": score / 2, "worst_decile": score / 4, "validation_accuracy": 0.5}
    summary = {"metric": "accuracy", "dataset": "digits", "personal": personal, "unconverged": score / 10}
    summary |= {"bytes_up": 1, "bytes_down": 1, "gradient_samples": 1, "seconds": 1.0}
    summary |= {
        "unseen": {"clients": 2, "personal": {"accuracy": score - 0.125}},
        "rounds_to": {"personal": {"0.5": 7}},
    }
    curves = {"round": [1, 2], "personal.accuracy": [score / 2, score], "duals.norm": [1.0, 10.0 * score]}
    digest = more.pop("digest", f"{method} {lr}")
    return Record(digest, seed, settings, **{"summary": summary, "curves": curves, **more})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A paper with records of two methods and three seeds, one of them without seed 2."""
    records = [record("fedrep", s, 0.5 + s / 8) for s in (0, 1, 2)]
    records += [record("fedeq", s, x, 0.3, settings={"algorithm.rho": 0.01}) for s, x in ((0, 0.625), (1, 0.875))]
    records += [record("fedeq", 0, 0.99, 0.2, settings={"algorithm.rho": 0.01}, trial=True)]
    add_records(tmp_path / "toy" / "results" / "r.jsonl", records)
    return tmp_path


def table(place: Path, **view: Any) -> list[list[str]]:
    view = {"files": ("r",), "rows": ("algorithm.name",), **view}
    text = table_of(View(**view), place / "toy" / "results", "view")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert set(rows[1]) == {"---"}
    return [rows[0], *rows[2:]]


def test_a_table_has_means_and_deviations_over_seeds_and_no_trials(place: Path) -> None:
    figures = ("personal", "personal.pooled", "personal.worst", "unseen", "algorithm.lr", "seeds")
    heads, fedeq, fedrep = table(place, figures=figures)
    assert heads == ["algorithm", "personal", "pooled", "worst", "unseen", "lr", "seeds"]
    assert fedeq[:2] == ["fedeq", f"75.00 ± {stdev([62.5, 87.5]):.2f}"]
    assert fedrep[:2] == ["fedrep", "62.50 ± 12.50"]
    assert fedrep[2:5] == ["31.25 ± 6.25", "15.62 ± 3.12", "50.00 ± 12.50"]
    assert (fedeq[5:], fedrep[5:]) == (["0.3", "2"], ["0.1", "3"])


def test_a_run_that_is_in_two_files_counts_once(place: Path) -> None:
    folder = place / "toy" / "results"
    (folder / "s.jsonl").write_text((folder / "r.jsonl").read_text())
    figures = ("personal", "seeds")
    assert table(place, files=("r", "s"), figures=figures) == table(place, figures=figures)


def test_an_empty_list_selects_the_runs_without_a_setting(place: Path) -> None:
    assert [row[0] for row in table(place, where={"algorithm.rho": []})] == ["algorithm", "fedrep"]
    assert [row[0] for row in table(place, where={"algorithm.rho": 0.01})] == ["algorithm", "fedeq"]


def test_figures_have_factors_and_digits_and_may_be_any_of_the_summary(place: Path) -> None:
    figures = (
        {"figure": "unconverged", "label": "unconverged %", "factor": 100.0, "digits": 1},
        {"figure": "unconverged"},
        {"figure": "rounds_to.personal.0.5", "label": "rounds"},
        {"figure": "rounds_to.personal.0.5", "label": "count", "digits": 0, "factor": 1000.0},
        {"figure": "score", "digits": 0},
        "global",
    )
    heads, _, fedrep = table(place, figures=figures)
    assert heads[1:] == ["unconverged %", "unconverged", "rounds", "count", "score", "global"]
    assert fedrep[1:5] == ["6.2 ± 1.2", "0.0625 ± 0.012", "7 ± 0", "7,000"]
    assert fedrep[5:] == ["62 ± 12", "–"]


def test_settings_may_count_as_repetitions(tmp_path: Path) -> None:
    cuts = {0.5: 0.25, 0.75: 0.75}
    records = [record("fedrep", 0, x, settings={"data.cut": c}, digest=f"r{c}") for c, x in cuts.items()]
    records += [record("local", 0, x / 2, settings={"data.cut": c}, digest=f"l{c}") for c, x in cuts.items()]
    add_records(tmp_path / "toy" / "results" / "r.jsonl", records)
    figures = ("personal", {"figure": "personal", "label": "from", "against": {"algorithm.name": "local"}})
    _, fedrep, _ = table(tmp_path, figures=figures, repeats=("data.cut",))
    assert fedrep == ["fedrep", "50.00 ± 35.36", "+25.00 ± 17.68"]
    with pytest.raises(EquipoiseError, match=r"runs with different data\.cut"):
        table(tmp_path)


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=2, max_size=6))
def test_differences_over_clients_are_means_over_seeds_with_their_standard_error(
    tmp_path_factory: pytest.TempPathFactory, scores: list[tuple[float, float, float, float]]
) -> None:
    place = tmp_path_factory.mktemp("clients")
    for seed in (0, 1):
        mine, other = ({f"c{k}": row[2 * m + seed] for k, row in enumerate(scores)} for m in (0, 1))
        each = (
            record("fedrep", seed, 0.5, clients={"trained": mine}),
            record("local", seed, 0.5, clients={"trained": other}),
        )
        add_records(place / "toy" / "results" / "r.jsonl", each)
    figure = {"figure": "score", "label": "by client", "over": "clients", "against": {"algorithm.name": "local"}}
    _, fedrep, _ = table(place, figures=(figure, {**figure, "figure": "unseen", "label": "unseen"}))
    by_client = [(a + b - c - d) / 2 for a, b, c, d in scores]
    expected = f"{100 * mean(by_client):+.2f} ± {100 * stdev(by_client) / len(scores) ** 0.5:.2f}"
    assert [cell.replace("+0.00", "-0.00") for cell in fedrep[1:]] == [expected.replace("+0.00", "-0.00"), "–"]


def test_clients_are_compared_with_a_control_only(place: Path) -> None:
    for wrong in ({"figure": "score"}, {"figure": "unconverged", "against": {"algorithm.name": "fedrep"}}):
        with pytest.raises(EquipoiseError, match="over = 'clients' needs against"):
            table(place, figures=({**wrong, "over": "clients"},))


@given(
    st.dictionaries(st.integers(0, 5), st.floats(0, 1), min_size=1), st.dictionaries(st.integers(0, 5), st.floats(0, 1))
)
def test_differences_from_a_control_are_paired_over_common_seeds(
    tmp_path_factory: pytest.TempPathFactory, ours: dict[int, float], theirs: dict[int, float]
) -> None:
    place = tmp_path_factory.mktemp("views")
    records = [record("fedeq", s, x, settings={"algorithm.rho": 0.1}) for s, x in ours.items()]
    records += [record("fedrep", s, x) for s, x in theirs.items()]
    add_records(place / "toy" / "results" / "r.jsonl", records)
    against = {"figure": "personal", "against": {"algorithm.name": "fedrep"}, "digits": 3}
    rows = table(place, rows=("algorithm.name", "algorithm.rho"), figures=("personal", against))[1:]
    apart = [100 * ours[s] - 100 * theirs[s] for s in ours if s in theirs]
    text = "–" if not apart else f"{mean(apart):.3f}" + (f" ± {stdev(apart):.3f}" if len(apart) > 1 else "")
    text = f"+{text}" if apart and mean(apart) > 0 else text
    if 0 < len(apart) < len(ours):
        text += f" ({len(apart)} pair{'s' if len(apart) > 1 else ''})"
    assert rows[0][:2] == ["fedeq", "0.1"]
    assert rows[0][3].replace("-0.000", "0.000").lstrip("+") == text.replace("-0.000", "0.000").lstrip("+")
    for row in rows[1:]:
        assert row[3] == "control"


def test_the_extreme_of_runs_that_differ_is_taken_seed_by_seed(tmp_path: Path) -> None:
    """The worst of several attacks: the largest loss against each seed's control."""
    scores = {"none": (0.9, 0.8), "ipm": (0.5, 0.7), "alie": (0.6, 0.2)}
    add_records(
        tmp_path / "toy" / "results" / "r.jsonl",
        [
            record("fedrep", seed, each[seed], settings={"attack.name": name})
            for name, each in scores.items()
            for seed in (0, 1)
        ],
    )
    against = {"figure": "personal", "against": {"attack.name": "none"}, "factor": -1.0, "digits": 1}
    figures = (
        {"figure": "personal", "digits": 1, "extreme": "smallest"},
        {**against, "extreme": "largest"},
        {**against, "extreme": "smallest"},
    )
    assert table(tmp_path, figures=figures)[1][1:] == ["35.0 ± 21.2", "+50.0 ± 14.1", "0.0 ± 0.0"]
    with pytest.raises(EquipoiseError, match=r"different attack\.name"):
        table(tmp_path, figures=("personal",))


def test_rows_and_columns_are_settings_in_an_order_or_named_lines(place: Path) -> None:
    methods = {
        "setting": "algorithm.name",
        "values": ("fedrep", "fedeq"),
        "names": {"fedeq": "FeDEQ"},
        "label": "method",
    }
    heads, *rows = table(place, rows=(methods,), figures=("seeds",))
    assert (heads, rows) == (["method", "seeds"], [["fedrep", "3"], ["FeDEQ", "2"]])
    heads, row = table(place, rows=("data.name",), columns=(methods,), figures=("personal",))
    assert heads == ["data", "fedrep", "FeDEQ"]
    assert row[1] == "62.50 ± 12.50"
    heads, _ = table(place, rows=("data.name",), columns=(methods,), figures=("personal", "seeds"))
    assert heads == ["data", "fedrep: personal", "fedrep: seeds", "FeDEQ: personal", "FeDEQ: seeds"]
    named = ({"label": "ours", "where": {"algorithm.rho": 0.01}}, {"label": "gone", "where": {"algorithm.rho": 9}})
    assert table(place, rows=named, figures=("seeds",)) == [["", "seeds"], ["ours", "2"]]
    assert table(place, where={"algorithm.lr": 0.1}, figures=("seeds",))[1:] == [["fedrep", "3"]]


def test_failed_runs_are_counted(place: Path) -> None:
    file = place / "toy" / "results" / "r.jsonl"
    add_records(file, [record("fedrep", 2, 0.0, summary={}, curves={}, failed="it diverged")])
    add_records(file, [record("local", 0, 0.0, summary={}, curves={}, failed="it diverged")])
    _, _, fedrep, local = table(place)
    assert fedrep[1] == "56.25 ± 8.84 (1 failed)"
    assert local[1] == "failed"


def test_runs_without_a_value_and_lost_pairs_are_counted(tmp_path: Path) -> None:
    def diverged(method: str, seed: int) -> Record:
        other = record(method, seed, 0.5)
        return replace(other, summary={**other.summary, "personal": {"accuracy": None}})

    def without(method: str, seed: int) -> Record:
        other = record(method, seed, 0.5)
        return replace(other, summary={k: v for k, v in other.summary.items() if k != "unconverged"})

    records = [record("a", 0, 0.5), record("a", 1, 0.75), diverged("a", 2), record("b", 0, 0.5), without("b", 1)]
    records += [diverged("c", 0), record("b", 2, 0.25, summary={}, curves={}, failed="x")]
    add_records(tmp_path / "toy" / "results" / "r.jsonl", records)
    against = {"figure": "personal", "against": {"algorithm.name": "b"}}
    a, b, c = table(tmp_path, figures=("personal", "seeds", "unconverged", against))[1:]
    assert a[1:3] == ["62.50 ± 17.68 (1 diverged)", "2"]
    assert b[1:4] == ["50.00 ± 0.00 (1 failed)", "2", "0.05 (1 failed, 1 without)"]
    assert c[1:3] == ["diverged", "0"]
    assert a[4] == "+12.50 ± 17.68 (1 diverged)"
    against["against"] = {"algorithm.name": "a"}
    add_records(tmp_path / "toy" / "results" / "r.jsonl", [record("b", 2, 0.5)])
    assert table(tmp_path, figures=(against,))[2][1] == "-12.50 ± 17.68 (2 pairs)"


def test_values_with_one_heading_are_refused_and_lists_are_values(tmp_path: Path) -> None:
    records = [
        record("a", 0, score, lr, settings={"model.hidden": hidden})
        for score, lr, hidden in ((0.5, 0.1, [64, 64]), (0.75, 0.10000001, [32]))
    ]
    add_records(tmp_path / "toy" / "results" / "r.jsonl", records)
    named = {"setting": "algorithm.lr", "names": {"0.1": "same", "0.10000001": "same"}}
    for rows, heading in ((("algorithm.lr",), "'0.1'"), ((named,), "'same'")):
        with pytest.raises(EquipoiseError) as caught:
            table(tmp_path, rows=rows)
        is_one_sentence(caught.value, f"0.1 and 0.10000001 of algorithm.lr have the same heading {heading}")
    apart = {"setting": "algorithm.lr", "names": {"0.10000001": "other"}}
    assert table(tmp_path, rows=(apart,))[1:] == [["0.1", "50.00"], ["other", "75.00"]]
    for values in ([[32], [64, 64]], ((32,), (64, 64))):
        rows = table(tmp_path, rows=({"setting": "model.hidden", "values": values},))[1:]
        assert rows == [["[32]", "75.00"], ["[64, 64]", "50.00"]]
        assert table(tmp_path, where={"model.hidden": values[0]})[1:] == [["a", "75.00"]]


def test_a_mean_over_different_settings_is_refused(place: Path) -> None:
    with pytest.raises(EquipoiseError) as caught:
        table(place, rows=("data.name",))
    is_one_sentence(caught.value, "runs with different algorithm.lr, algorithm.name", "rows, columns or where")
    with pytest.raises(EquipoiseError, match="no recorded run has these settings"):
        table(place, where={"rounds": 3})


@pytest.mark.parametrize(
    ("short", "field"),
    [
        ("personal", "personal.accuracy"),
        ("consensus.spread", "consensus.accuracy_std"),
        ("global.validation", "global.validation_accuracy"),
        ("unseen", "unseen.personal.accuracy"),
        ("unseen.global.pooled", "unseen.global.accuracy_pooled"),
        ("unseen.clients", "unseen.clients"),
        ("solver_iterations", "solver_iterations"),
        ("personal.loss", "personal.loss"),
    ],
)
def test_short_names_of_scores(short: str, field: str) -> None:
    assert field_of(short, "accuracy") == field


def test_curves_have_the_values_of_all_seeds(place: Path) -> None:
    view = View(files=("r",), rows=("algorithm.name",), figures=("personal", "duals.norm"))
    curves = dict(curves_of(view, place / "toy" / "results", "v"))
    assert list(curves) == ["fedeq personal", "fedeq duals.norm", "fedrep personal", "fedrep duals.norm"]
    assert curves["fedrep personal"] == [(1, [25.0, 31.25, 37.5]), (2, [50.0, 62.5, 75.0])]
    assert curves["fedeq duals.norm"] == [(1, [1.0, 1.0]), (2, [6.25, 8.75])]


def test_curves_may_be_drawn_against_the_megabytes_sent(place: Path) -> None:
    view = View(files=("r",), rows=("algorithm.name",), where={"algorithm.name": "fedrep"})
    sent = View(**{**view.model_dump(), "horizontal": "megabytes"})
    [(_, rounds)], [(_, megabytes)] = (curves_of(each, place / "toy" / "results", "v") for each in (view, sent))
    assert [values for _, values in megabytes] == [values for _, values in rounds]
    assert [at for at, _ in megabytes] == [1e-6, 2e-6]  # a byte up and a byte down in two rounds


def test_named_rows_and_columns_of_curves_combine_as_in_a_table(place: Path) -> None:
    methods = ({"label": "theirs", "where": {"algorithm.name": "fedrep"}},)
    rates = ({"label": "slow", "where": {"algorithm.lr": 0.1}}, {"label": "fast", "where": {"algorithm.lr": 0.3}})
    for rows, columns, names in (
        (methods, ("algorithm.lr",), ["theirs 0.1"]),
        (("algorithm.name",), rates, ["fedeq fast", "fedrep slow"]),
        (methods, rates, ["theirs slow"]),
    ):
        view = View(files=("r",), rows=rows, columns=columns)
        curves = dict(curves_of(view, place / "toy" / "results", "v"))
        assert list(curves) == names
        theirs = next(values for name, values in curves.items() if name.startswith(("theirs", "fedrep")))
        assert theirs == [(1, [25.0, 31.25, 37.5]), (2, [50.0, 62.5, 75.0])]


def test_a_figure_at_a_round_is_that_of_the_curves(place: Path) -> None:
    first, last = ({"figure": "personal", "label": f"round {k}", "round": k} for k in (1, 2))
    norm = {"figure": "duals.norm", "label": "norm", "round": 2, "digits": 1}
    heads, fedeq, fedrep = table(place, figures=(first, last, norm, {"figure": "personal", "label": "x", "round": 3}))
    assert heads[1:] == ["round 1", "round 2", "norm", "x"]
    assert fedrep[1:] == ["31.25 ± 6.25", "62.50 ± 12.50", "6.2 ± 1.2", "–"]
    assert fedeq[2] == table(place, figures=("personal",))[1][1]


def test_steps_of_forecasts_are_numbered_and_seeds_can_be_selected(tmp_path: Path) -> None:
    steps = {"forecast": {"unit": "kW", "step": 60, "horizon": 2, "personal": {"steps": [0.5, 1.5]}}}
    records = [record("local", seed, 0.5) for seed in (0, 1)]
    records = [Record(**{**vars(each), "summary": {**each.summary, **steps}}) for each in records]
    add_records(tmp_path / "toy" / "results" / "r.jsonl", records)
    figures = [{"figure": f"forecast.personal.steps.{k}", "label": f"step {k}"} for k in (1, 2, 3, 0)]
    [_, row] = table(tmp_path, figures=tuple(figures), where={"seed": 1})
    assert row[1:] == ["0.5", "1.5", "–", "–"]


@pytest.mark.parametrize(("higher", "expected"), [(True, "2 of 3"), (False, "1 of 3")])
def test_clients_that_are_served_better_are_counted(higher: bool, expected: str, tmp_path: Path) -> None:
    """The third client is better with the second seed only, and by less than it is worse with the first."""
    scores = {"fedrep": [(0.5, 0.9, 0.4), (0.5, 0.9, 0.7)], "local": [(0.4, 0.8, 0.6), (0.4, 0.8, 0.6)]}
    for name, seeds in scores.items():
        records = []
        for seed, row in enumerate(seeds):
            made = record(name, seed, 0.5, clients={"trained": dict(zip("abc", row, strict=True))})
            made.summary["higher_is_better"] = higher
            records.append(made)
        add_records(tmp_path / "toy" / "results" / "r.jsonl", records)
    figure = {"figure": "score", "over": "better", "against": {"algorithm.name": "local"}}
    assert table(tmp_path, figures=(figure,))[1] == ["fedrep", expected]


PAGE = """# Results
<!-- table: toy/methods -->
old
<!-- end -->

Words between.

<!-- plot: toy/curves -->
<!-- end -->
```
<!-- table: toy/in a listing -->
```
"""


@pytest.fixture
def page(place: Path) -> Path:
    views = {
        "methods": {"files": ["r"], "rows": ["algorithm.name"], "figures": ["personal", "seeds"]},
        "curves": {"files": ["r"], "rows": ["algorithm.name"], "title": "Curves", "axis": "%", "logarithmic": True},
    }
    (place / "toy" / "results" / "views.toml").write_text(tomli_w.dumps(views))
    (place / "page.md").write_text(PAGE)
    return place / "page.md"


def test_blocks_are_filled_and_stay_until_a_record_changes(place: Path, page: Path) -> None:
    assert fill([page], place, check=True) == [page]
    assert page.read_text() == PAGE
    assert not (place / "toy-curves.svg").exists()
    assert fill([page], place) == [page]
    text = page.read_text()
    assert "| fedrep | 62.50 ± 12.50 | 3 |" in text
    assert "old" not in text
    assert "Words between.\n\n<!-- plot: toy/curves -->\n![Curves](toy-curves.svg)\n<!-- drawn from " in text
    assert text.endswith("```\n<!-- table: toy/in a listing -->\n```\n")
    picture = (place / "toy-curves.svg").read_text()
    assert "fedrep" in picture
    assert "$" not in picture  # numbers at a logarithmic axis are plain text
    assert fill([page], place) == fill([page], place, check=True) == []
    add_records(place / "toy" / "results" / "r.jsonl", [record("fedrep", 2, 1.0)])
    assert fill([page], place, check=True) == [page]
    fill([page], place)
    assert page.read_text() != text
    assert (place / "toy-curves.svg").read_text() != picture
    (place / "toy-curves.svg").unlink()
    assert fill([page], place, check=True) == [page]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- table: toy/method -->\n<!-- end -->\n", "line 1: .* has no view 'method'; did you mean 'methods'"),
        ("<!-- table: toy/methods -->\n", "has no <!-- end -->"),
        ("<!-- table: toy/methods -->\n<!-- plot: toy/curves -->\n", "line 2: the block before it has no <!-- end -->"),
        ("<!-- table: methods -->\n<!-- end -->\n", "it must be PAPER/VIEW"),
        ("<!-- table: none/methods -->\n<!-- end -->\n", "there is no file"),
    ],
)
def test_a_wrong_block_gets_one_sentence(text: str, words: str, place: Path, page: Path) -> None:
    page.write_text(text)
    with pytest.raises(EquipoiseError, match=words) as caught:
        filled(page, place)
    is_one_sentence(caught.value, str(page))


def test_a_wrong_view_gets_one_sentence(place: Path, page: Path) -> None:
    (place / "toy" / "results" / "views.toml").write_text('[methods]\nfiles = ["r"]\nrows = []\nfigure = []\n')
    with pytest.raises(EquipoiseError) as caught:
        filled(page, place)
    is_one_sentence(caught.value, "methods.figure", "did you mean 'figures'?")


def test_the_documentation_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, run `make results`."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert fill(pages, own(), check=True) == []
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == ""
