"""The area under the ROC curve of learned strengths, where it is known which coefficients are shared."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from equipoise import load_data
from equipoise.algorithms import Learn2pFed
from equipoise.data.sources.polynomial import Polynomial
from equipoise.evaluation.sharing import sharing_area
from tests.support.problems import linear_module, simulation


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    strengths = torch.tensor([[3.0, 1.0], [2.0, 2.0]])
    assert sharing_area(strengths, (0,)) == (1 + 1 + 1 + 0.5) / 4
    assert sharing_area(strengths, (1,)) == 0.5 / 4
    assert sharing_area(torch.ones(3, 4), (0, 1)) == 0.5


@pytest.mark.parametrize("setting", [1, 2, 3])
def test_polynomials_know_what_their_clients_share(setting: int) -> None:
    source = Polynomial(setting=setting)
    a = source.coefficients(4, 0)
    assert source.shared_inputs == tuple(k for k in range(4) if (a[:, k] == a[0, k]).all())
    assert Polynomial(setting=setting, basis="legendre").shared_inputs == ()


@pytest.mark.parametrize(("basis", "known"), [("monomials", True), ("legendre", False)])
def test_a_run_reports_it_where_it_is_known(tmp_path: Path, basis: str, known: bool) -> None:
    federation = load_data("polynomial", seed=0, clients=3, points=30, setting=2, basis=basis)
    algorithm = Learn2pFed(cells=2, lam=1.0, outer_lr=1.0)
    run = simulation(algorithm, federation, linear_module(4), loss="squared", rounds=2, folder=tmp_path / "run")
    run.run()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert ("sharing_area" in summary) == known
    if known:
        lam = load_file(tmp_path / "run" / "shown.safetensors")["lam"]
        assert summary["sharing_area"] == sharing_area(lam, (0, 1))
