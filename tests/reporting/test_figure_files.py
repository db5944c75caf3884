"""Pictures for papers: formats, text that stays text, the same bytes every time, and bands over seeds."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.figure import Figure

from equipoise.data.federation import from_clients
from equipoise.errors import EquipoiseError
from equipoise.evaluation.cka import Similarity
from equipoise.reporting import federation_plot, plots
from equipoise.storage.run_index import FinishedRun
from tests.support.commands import equipoise_command, one_sentence
from tests.support.finished_runs import finished
from tests.support.waiting import LIMIT

TWO_SEEDS = [finished("ditto", 0.9, seed, curve=(0.5 + seed / 10, 0.8, 0.9 - seed / 10)) for seed in (0, 1)]
ONE_SEED = [finished("fedavg", 0.8, curve=(0.4, 0.6, 0.8))]
BAND = "band: ± standard deviation over seeds"


def texts(path: Path) -> list[str]:
    """All texts of an SVG file."""
    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(each.itertext()) for each in found]


@pytest.mark.parametrize("kind", ["scores", "losses", "fairness"])
def test_text_stays_text_in_svg_and_fonts_are_truetype_in_pdf(kind: str, tmp_path: Path) -> None:
    plots.draw(kind, [*TWO_SEEDS, *ONE_SEED], tmp_path / "a.svg")
    assert "ditto (personal)" in texts(tmp_path / "a.svg")
    plots.draw(kind, [*TWO_SEEDS, *ONE_SEED], tmp_path / "a.pdf")
    written = (tmp_path / "a.pdf").read_bytes()
    assert written.startswith(b"%PDF")
    assert b"/FontFile2" in written  # TrueType; fonts of type 3 have no such file
    assert b"/Type3" not in written
    assert b"/CreationDate" not in written


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_the_same_runs_give_the_same_bytes(ending: str, tmp_path: Path) -> None:
    clients = [(np.random.default_rng(0).normal(size=(20, 3)).astype("float32"), np.arange(20) % 2)] * 2
    similarity = Similarity("run", 3, "a and b", 9, ("body", "head"), ("x", "y"), np.array([[0.5, 0.6], [0.7, 0.9]]))
    for name in ("a", "b"):
        plots.draw("scores", [*TWO_SEEDS, *ONE_SEED], tmp_path / f"{name}-scores.{ending}")
        plots.draw_similarity([similarity], tmp_path / f"{name}-cka.{ending}")
        federation_plot.draw(from_clients(clients), tmp_path / f"{name}-federation.{ending}")
    for what in ("scores", "cka", "federation"):
        one, two = ((tmp_path / f"{name}-{what}.{ending}").read_bytes() for name in "ab")
        assert one == two
        assert one.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending])


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    plots.draw("scores", TWO_SEEDS, tmp_path / "here.svg")
    code = "from tests.reporting.test_figure_files import *; plots.draw('scores', TWO_SEEDS, Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "there.svg")]
    subprocess.run(command, check=True, timeout=LIMIT)
    assert (tmp_path / "here.svg").read_bytes() == (tmp_path / "there.svg").read_bytes()


def axes_of(runs: list[FinishedRun], monkeypatch: pytest.MonkeyPatch, path: Path, kind: str = "scores") -> Any:
    """The axes of a picture as it is saved."""
    seen: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: seen.append(figure) or save(figure, *a, **k))
    plots.draw(kind, runs, path)
    return seen[0].axes[0]


def test_a_band_is_the_deviation_over_seeds_and_the_legend_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = axes_of([*TWO_SEEDS, *ONE_SEED], monkeypatch, tmp_path / "a.png")
    [band] = [each for each in axes.collections if isinstance(each, FillBetweenPolyCollection)]
    corners = band.get_paths()[0].vertices
    for at, values in ((1, (50, 60)), (2, (80, 80)), (3, (90, 80))):
        ys = corners[corners[:, 0] == at, 1]
        middle, deviation = np.mean(values), np.std(values, ddof=1)
        np.testing.assert_allclose([ys.min(), ys.max()], [middle - deviation, middle + deviation])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "ditto (personal)",
        "fedavg (personal)",
        BAND,
    ]


def test_one_seed_has_no_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = axes_of(ONE_SEED, monkeypatch, tmp_path / "a.png")
    assert list(axes.collections) == []
    assert BAND not in [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_single_round_shows_its_deviation_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = axes_of([finished("ditto", 0.9), finished("ditto", 0.7, 1)], monkeypatch, tmp_path / "a.png")
    assert BAND in [text.get_text() for text in axes.get_legend().get_texts()]


def test_attacks_have_bands_where_there_are_several_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [finished("ditto", 0.9, seed) for seed in (0, 1)]
    for seed, names in ((0, ["a"]), (1, ["a"]), (0, ["a", "b"])):
        run = finished("ditto", 0.5 + seed / 10, seed, attack__name="sign-flip", attack__fraction=len(names) / 5)
        run.summary["malicious"] = names
        runs.append(run)
    axes = axes_of(runs, monkeypatch, tmp_path / "a.svg", "attacks")
    [band] = axes.collections
    assert set(band.get_paths()[0].vertices[:, 0]) == {0.0, 0.2}  # not at 0.4, where there is one seed
    assert BAND in texts(tmp_path / "a.svg")


def test_dollars_in_names_are_dollars(tmp_path: Path) -> None:
    plots.draw("scores", [finished("$x_{$", 0.5, dataset="$ and $")], tmp_path / "a.svg")
    assert "$x_{$ (personal)" in texts(tmp_path / "a.svg")


def test_another_ending_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for command in ("plot", "cka", "show"):
        done = equipoise_command(command, "nowhere", "--out", "a.jpg", cwd=tmp_path)
        one_sentence(done, 2, "--out a.jpg is not allowed", "FILE.png, FILE.pdf or FILE.svg")
    with pytest.raises(EquipoiseError, match=r"a\.jpg is not allowed"):
        plots.draw("scores", ONE_SEED, tmp_path / "a.jpg")
    assert list(tmp_path.iterdir()) == []
