"""Clients that come after training adapt as unseen clients of the run would have."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.algorithms.base import Algorithm
from equipoise.data.federation import Federation
from tests.support.odd_models import CLIENTS, batch_norm, images, module
from tests.support.problems import classification, small_mlp

NEW = "client-3"


def apart() -> tuple[Federation, Federation, Federation]:
    """Return a federation with an unseen client, the same without it, and that client alone."""
    whole = replace(classification(), unseen=frozenset([NEW]))
    rest = replace(whole, unseen=frozenset()).keeping([name for name in whole.names if name != NEW])
    return whole, rest, replace(whole, unseen=frozenset()).keeping([NEW])


def test_a_newcomer_adapts_as_an_unseen_client_of_the_run(in_mode: tuple[Algorithm, str], tmp_path: Path) -> None:
    algorithm, mode = in_mode
    whole, rest, new = apart()
    options = {"rounds": 2, "participation": 3, "mode": mode}
    expected = eq.train(small_mlp(), whole, algorithm, **options)
    result = eq.train(small_mlp(), rest, algorithm, out=tmp_path / "run", **options)
    for later in (result, eq.load_result(tmp_path / "run", small_mlp(seed=5))):
        adapted = later.adapt(new)
        for kind, table in adapted.scores().items():
            np.testing.assert_array_equal(table[0], expected.scores()[kind][3])
        assert adapted.scores().keys() == set(expected.summary["unseen"]) - {"clients", "adaptation_samples"}
        x = new.x[:4].float()
        assert torch.equal(adapted.predict(NEW, x), expected.predict(NEW, x))


def test_statistics_of_batch_norm_are_the_newcomers_own(tmp_path: Path) -> None:
    data = images()
    federation = replace(eq.from_clients(data), unseen=frozenset("c"))
    expected = eq.train(batch_norm(), federation, eq.FedAvg(batch=7, lr=0.1), rounds=2)
    both = federation.keeping(["a", "b"])
    result = eq.train(batch_norm(), replace(both, unseen=frozenset()), eq.FedAvg(batch=7, lr=0.1), rounds=2)
    adapted = result.adapt({"c": data["c"]})
    np.testing.assert_array_equal(adapted.scores()["personal"][0], expected.scores()["personal"][2])
    for name, tensor in expected.personal("c").state_dict().items():
        assert torch.equal(adapted.personal(0).state_dict()[name], tensor), name


def test_adapted_models_are_written_and_loaded(tmp_path: Path) -> None:
    result = eq.train(module(), CLIENTS, "ditto", head=None, rounds=1)
    adapted = result.adapt({"new": CLIENTS[0], "a/b": CLIENTS[1]})
    adapted.save(tmp_path / "models")
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [
        *("client-1.safetensors", "clients.csv", "new.safetensors")
    ]
    x = torch.tensor(CLIENTS[2][0])
    for client, file in (("new", "new"), (1, "client-1")):
        loaded = eq.load_model(tmp_path / "models" / f"{file}.safetensors", module())
        assert torch.equal(loaded(x), adapted.personal(client)(x))
    assert (tmp_path / "models" / "clients.csv").read_text().splitlines()[2].startswith("a/b,15,2,4,")
    assert adapted.summary["personal"]["accuracy"] == pytest.approx(adapted.scores()["personal"][:, 3].mean())
    with pytest.raises(eq.EquipoiseError, match="is not empty; choose another folder"):
        adapted.save(tmp_path / "models")


def test_a_method_without_adaptation_gives_the_global_model() -> None:
    class Fixed(eq.FedAvg):
        """Newcomers use the global model."""

        def adapt(self, client, down, data):
            return None

    result = eq.train(module(), CLIENTS, Fixed(), head=None, rounds=1)
    adapted = result.adapt([CLIENTS[0]])
    np.testing.assert_array_equal(adapted.predict(0, CLIENTS[1][0]), result.predict(0, CLIENTS[1][0]))
    assert set(adapted.scores()) == {"global"}
    with pytest.raises(eq.EquipoiseError, match="Fixed has no models of new clients; they use the global model"):
        adapted.personal(0)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (
            [(np.zeros((9, 5)), np.zeros(9, dtype=int))],
            r"inputs are numbers of shape \[5\], and the run was",
        ),
        ([(np.zeros((9, 4), dtype=int), np.zeros(9, dtype=int))], "inputs are whole numbers of shape"),
        (
            [(np.zeros((9, 4)), np.zeros((9, 2)))],
            r"targets are numbers of shape \[2\], and .* whole numbers",
        ),
        ([(np.zeros((9, 4)), np.full(9, 3))], "there is a label 3, and the model has only 3 outputs"),
        ([(np.zeros((9, 4)), np.full(9, -1))], "there is a label -1; the classes must be numbered from 0"),
        ([(np.full((9, 4), np.nan), np.zeros(9, dtype=int))], "NaN or infinite values"),
        (CLIENTS[0], r"clients is one pair \(x, y\)"),
        ([], "the list of clients is empty"),
    ],
)
def test_data_that_do_not_fit_are_said(clients, words: str) -> None:
    result = eq.train(module(), CLIENTS, "ditto", head=None, rounds=1)
    with pytest.raises(eq.EquipoiseError, match=words):
        result.adapt(clients)
