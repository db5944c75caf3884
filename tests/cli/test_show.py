"""What a federation looks like, against figures made by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from equipoise.config.experiment import Experiment
from equipoise.data.federation import from_clients
from equipoise.data.statistics import federation_statistics, gini, label_counts, total_variation
from equipoise.reporting.federation_plot import draw
from tests.support import datafiles
from tests.support.commands import equipoise_command


def test_gini_of_known_sizes() -> None:
    assert gini(np.array([5, 5, 5])) == pytest.approx(0)
    assert gini(np.array([0, 0, 0, 8])) == pytest.approx(3 / 4)
    assert gini(np.array([1, 3])) == pytest.approx(1 / 4)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 9))
def test_gini_is_half_the_relative_mean_difference(sizes: list[int], factor: int) -> None:
    x = np.array(sizes)
    n = len(x)
    expected = np.abs(x[:, None] - x[None]).sum() / (2 * n * n * x.mean())
    assert gini(x) == pytest.approx(expected, abs=1e-12)
    assert gini(factor * x[::-1]) == pytest.approx(expected, abs=1e-12)


def test_counts_and_distances_by_hand() -> None:
    labels = [[0, 0, 1, 1], [2, 2, 2, 2, 2, 2], [0, 1]]
    federation = from_clients([{"train": (np.zeros((len(y), 3)), np.array(y))} for y in labels])
    counts = label_counts(federation)
    assert counts is not None
    assert counts.tolist() == [[2, 2, 0], [0, 0, 6], [1, 1, 0]]
    np.testing.assert_allclose(total_variation(counts), [0.5, 0.5, 0.5])  # the pool is (1/4, 1/4, 1/2)
    found = federation_statistics(federation)
    assert found["labels a client, fewest"] == 1
    assert found["labels a client, most"] == 2
    assert found["labels a client, mean"] == pytest.approx(5 / 3, abs=0.01)
    assert found["mean total-variation distance"] == 0.5
    assert found["Gini of sizes"] == pytest.approx(gini(np.array([4, 6, 2])), abs=1e-4)
    assert (found["samples"], found["largest client"]) == (12, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        {"name": "mnist", "clients": 5, "partition": {"kind": "quality"}},
        {"name": "cifar10", "clients": 50, "partition": {"kind": "quantity", "min_samples": 1}},
        {"name": "shakespeare"},
        {"name": "electricity"},
        {"name": "linear", "clients": 1},
    ],
)
def test_every_kind_of_data_can_be_drawn(data: dict, tmp_path: Path) -> None:
    datafiles.everything(tmp_path)
    tables = {"data": data, "model": {"name": "softmax"}, "algorithm": {"name": "local"}}
    federation = Experiment.parse(tables).federation(tmp_path)
    draw(federation, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as image:
        assert len(np.unique(np.asarray(image.convert("L")))) > 20


def test_dollars_in_names_and_texts_are_dollars(tmp_path: Path) -> None:
    words = datafiles.WORDS * 10
    (tmp_path / "shakespeare-roles.json").write_text(json.dumps({"$x_{$ & y": words.replace("a", "$"), "other": words}))
    tables = {"data": {"name": "shakespeare"}, "model": {"name": "transformer"}, "algorithm": {"name": "local"}}
    draw(Experiment.parse(tables).federation(tmp_path), tmp_path / "picture.png")


@pytest.mark.slow
def test_show_prints_and_draws(tmp_path: Path) -> None:
    file = tmp_path / "digits.toml"
    data = '[data]\nname = "digits-by-writer"\nclients = 12\nunseen = 0.25\n'
    file.write_text(data + '[model]\nname = "mlp"\n[algorithm]\nname = "local"\n')
    done = equipoise_command("show", file, "--set", "data.extent=excerpt", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["clients"], found["unseen"]) == (12, 3)
    assert (tmp_path / "digits-federation.png").exists()
    shown = equipoise_command("show", file, "--out", "other.png", cwd=tmp_path)
    assert "mean total-variation distance" in shown.stdout
    assert "other.png" in shown.stdout
    assert equipoise_command("show", file, "--out", "other.pdf", cwd=tmp_path).returncode == 0
    assert (tmp_path / "other.pdf").read_bytes().startswith(b"%PDF")
