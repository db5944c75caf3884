"""kNN-Per against a plain search, sample by sample."""

from math import exp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.algorithms import FedAvg, KnnPer
from equipoise.algorithms._knn import Neighbours
from equipoise.algorithms.local_data import ClientSamples
from equipoise.config.experiment import Experiment
from equipoise.data.federation import from_clients
from equipoise.errors import EquipoiseError
from equipoise.metrics import METRICS
from equipoise.models.base import BodyAndHead
from equipoise.runs.export import export_model
from equipoise.runs.launch import run as run_experiment
from equipoise.runs.result import Result
from tests.support.problems import classification, simulation, small_mlp


def searched(module: nn.Module, x: Tensor, y: Tensor, query: Tensor, k: int, mix: float, classes: int) -> np.ndarray:
    """Probabilities by a loop over samples, as the paper writes them."""
    features = module.body(x).detach().numpy()
    rows = []
    for one in query:
        mine = module.body(one[None])[0].detach().numpy()
        nearest = sorted((float(np.linalg.norm(mine - f)), int(label)) for f, label in zip(features, y, strict=True))[
            :k
        ]
        votes = np.zeros(classes)
        for distance, label in nearest:
            votes[label] += exp(-distance)
        own = module(one[None])[0].softmax(-1).detach().numpy()
        rows.append((1 - mix) * own + mix * votes / votes.sum())
    return np.array(rows)


@settings(max_examples=30)
@given(
    st.integers(1, 12), st.integers(1, 9), st.sampled_from([0.0, 0.3, 1.0]), st.integers(1, 15), st.integers(0, 1000)
)
def test_it_is_the_plain_search(samples: int, queries: int, mix: float, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    module = small_mlp().double().eval()
    x, query = (torch.from_numpy(rng.normal(size=(n, 5))) for n in (samples, queries))
    y = torch.from_numpy(rng.integers(0, 3, samples))
    neighbours = Neighbours(module, "head", x, y)
    own, (nearest,) = neighbours.answers(query, [k])
    found = neighbours.mixed(own, nearest, mix).exp().detach().numpy()
    np.testing.assert_allclose(found, searched(module, x, y, query, k, mix, 3), rtol=1e-8, atol=1e-10)


def test_the_best_k_and_weight_are_those_of_a_search_over_all() -> None:
    rng = np.random.default_rng(1)
    module = small_mlp().double().eval()
    x, v = (torch.from_numpy(rng.normal(size=(n, 5))) for n in (40, 25))
    y, w = (torch.from_numpy((t.numpy()[:, 0] > 0).astype(np.int64)) for t in (x, v))
    ks, mixes = (1, 3, 10), (0.0, 0.25, 0.5, 1.0)
    neighbours = Neighbours(module, "head", x, y)
    chosen = neighbours.best(ClientSamples((x, y), (v, w), "head", METRICS["accuracy"]), ks, mixes)
    right = {
        (k, mix): (searched(module, x, y, v, k, mix, 3).argmax(1) == w.numpy()).mean() for k in ks for mix in mixes
    }
    assert right[chosen] == max(right.values())
    assert chosen == next(pair for pair, value in right.items() if value == max(right.values()))
    assert right[chosen] > right[1, 0.0]
    empty = ClientSamples((x, y), (v[:0], w[:0]), "head", METRICS["accuracy"])
    assert neighbours.best(empty, ks, mixes) == (1, 0.0)


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_scores_are_those_of_the_search_and_of_the_model_that_is_given_out(mode: str) -> None:
    federation = classification().holding_out(0.2, 0)
    run = simulation(KnnPer(lr=0.1, batch=4, k=(3,), mix=(0.6,)), federation, rounds=3, mode=mode)
    run.run()
    table, result = run.scores.tables()["personal"], Result(run)
    for who in range(len(federation)):
        (x, y), (tx, ty) = (
            run.federation.gather(torch.from_numpy(split[who])) for split in (run.federation.train, run.federation.test)
        )
        module = run.task.to_module(run.server.w)
        right = searched(module, x, y, tx, 3, 0.6, 3).argmax(1) == ty.numpy()
        assert table[who, 3] == pytest.approx(right.mean())
        np.testing.assert_array_equal(
            result.personal(who)(tx).argmax(1), searched(module, x, y, tx, 3, 0.6, 3).argmax(1)
        )
    assert torch.equal(run.server.w, _fedavg(federation, mode).server.w)


def _fedavg(federation, mode: str):
    run = simulation(FedAvg(lr=0.1, batch=4), federation, rounds=3, mode=mode)
    run.run()
    return run


def test_both_modes_agree() -> None:
    tables = []
    for mode in ("threads", "stacked"):
        run = simulation(KnnPer(lr=0.1, batch=4), rounds=2, mode=mode)
        run.run()
        tables.append(run.scores.tables()["personal"])
    np.testing.assert_allclose(*tables, rtol=1e-9)


class Positions(nn.Module):
    """An answer a position."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(x, 4).double()


def test_texts_are_looked_up_by_position() -> None:
    module = BodyAndHead(Positions(), nn.Linear(4, 4).double())
    x = torch.tensor([[0, 1, 2], [3, 3, 0]])
    y = (x + 1) % 4  # after a character comes the next one
    own, (nearest,) = Neighbours(module, "head", x, y).answers(torch.tensor([[2, 1, 3]]), [1])
    assert own.shape == nearest.shape == (3, 4)
    assert nearest.argmax(1).tolist() == [3, 2, 0]
    last = Neighbours(module, "head", x, y[:, -1])  # one target: what the last position says
    assert last.answers(torch.tensor([[3, 3, 2], [1, 1, 0]]), [1])[1][0].argmax(1).tolist() == [3, 1]


def test_numbers_are_averaged() -> None:
    module = BodyAndHead(nn.Identity(), nn.Linear(2, 1).double())
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 9.0]]).double()
    y = torch.tensor([1.0, 3.0, 100.0]).double()
    neighbours = Neighbours(module, "head", x, y)
    own, (nearest,) = neighbours.answers(torch.tensor([[0.5, 0.0]]).double(), [2])
    assert nearest.item() == pytest.approx(2.0)  # both at the same distance
    assert neighbours.mixed(own, nearest, 0.25).item() == pytest.approx(0.75 * own.item() + 0.5)


def test_it_needs_a_head_to_read_the_features_of() -> None:
    with pytest.raises(EquipoiseError, match="name the submodule that is the head"):
        simulation(KnnPer(), head=None)


def test_far_away_samples_do_not_overflow() -> None:
    module = BodyAndHead(nn.Identity(), nn.Linear(1, 2).double())
    x = torch.tensor([[0.0], [1e6]]).double()
    neighbours = Neighbours(module, "head", x, torch.tensor([0, 1]))
    _, (nearest,) = neighbours.answers(torch.tensor([[-1e7], [2e6]]).double(), [2])
    assert nearest.argmax(1).tolist() == [0, 1]
    assert torch.isfinite(nearest).all()


def test_a_client_without_samples_to_score_has_no_score_in_either_mode() -> None:
    rng = np.random.default_rng(0)
    parts = [
        {"train": (rng.normal(size=(8, 5)), rng.integers(0, 3, 8)), **rest}
        for rest in ({"test": (rng.normal(size=(4, 5)), rng.integers(0, 3, 4))}, {})
    ]
    for mode in ("threads", "stacked"):
        run = simulation(KnnPer(batch=4), from_clients(parts), rounds=1, participation=1.0, mode=mode)
        run.run()
        table = run.scores.tables()["personal"]
        assert np.isfinite(table[0, 2:]).all()
        assert np.isnan(table[1]).all()


def test_numbers_a_position_are_all_compared() -> None:
    """With no weight on neighbours it is the global model, also where a sample has several outputs."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x.unsqueeze(-1))
            return out  # (n, positions, 1)

    rng = np.random.default_rng(0)
    parts = [{"train": (x := rng.normal(size=(9, 4)), 2 * x), "test": (x, 2 * x)} for _ in range(2)]
    run = simulation(KnnPer(mix=(0.0,), batch=4), from_clients(parts), Twice(), loss="squared", rounds=1)
    run.run()
    tables = run.scores.tables()
    np.testing.assert_allclose(tables["personal"][:, 2:], tables["global"][:, 2:], rtol=1e-9)


def test_its_personal_model_cannot_be_exported(tmp_path) -> None:
    tables = {
        "rounds": 1,
        "data": {"name": "linear", "clients": 3, "samples": 12},
        "model": {"name": "linear"},
        "algorithm": {"name": "knn-per"},
    }
    experiment = Experiment.parse(tables)
    run_experiment(experiment, tmp_path / "run")
    with pytest.raises(EquipoiseError, match="export the global model with --global"):
        export_model(tmp_path / "run", "0", tmp_path / "model.safetensors")
    assert export_model(tmp_path / "run", None, tmp_path / "model.safetensors") == ("global", False)
