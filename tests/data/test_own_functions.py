"""The user's own data: what a function may return."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.config.experiment import Experiment
from equipoise.data.federation import Federation
from equipoise.errors import EquipoiseError
from tests.support.commands import is_one_sentence, small

SPLITS = ("train", "validation", "test")


def rows_of(federation: Federation, who: int, split: str) -> tuple[list[list[float]], list[Any]]:
    x, y = federation.gather(torch.from_numpy(np.sort(getattr(federation, split)[who])))
    return x.tolist(), y.tolist()


def said(words: tuple[str, ...], act: Callable[[], object]) -> None:
    with pytest.raises(EquipoiseError) as caught:
        act()
    is_one_sentence(caught.value, *words)


FUNCTIONS = """
from pathlib import Path

import numpy as np
import equipoise as eq

X, Y = np.arange(40.0).reshape(20, 2), np.arange(20) % 3


def as_list():
    return [(X[:8], Y[:8]), {"train": (X[8:12], Y[8:12]), "test": (X[12:], Y[12:])}]


def by_name(clients, seed, split, *, size: int = 4):
    return {f"ward {k}": (X[:size] + seed, Y[:size]) for k in range(clients or 2)}


def federation():
    return eq.from_clients([(X[:8], Y[:8]), (X[8:], Y[8:])], names=["p", "q"])


def pool():
    return eq.Pool(eq.from_clients([(X, Y)]).x, eq.from_clients([(X, Y)]).y, 3)


def arrays():
    return X, Y


def files(place: Path, other: Path | None = None):
    assert place.is_absolute() and other is None
    return [(X, np.full(20, int(place.read_text())))]


def nothing():
    return 3


def fails():
    raise ValueError("the disk\\nis on fire")


def held_out():
    return eq.from_clients([(X, Y), (X, Y)]).holding_out(0.5, 0)


def most(most=3):
    return []


class Mine(eq.Source):
    rows: int = 5

    def load(self, ask):
        return eq.Pool(eq.from_clients([(X, Y)]).x[: self.rows], eq.from_clients([(X, Y)]).y[: self.rows], 3)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return f"{tmp_path}/functions.py"


def test_a_function_may_return_what_train_takes(functions: str) -> None:
    found = eq.load_data(f"{functions}:as_list", split=[0.5, 0.25, 0.25])
    assert found.names == ("client-0", "client-1")
    assert [[len(getattr(found, split)[k]) for split in SPLITS] for k in (0, 1)] == [[4, 2, 2], [4, 0, 8]]
    assert found.title == "as_list"
    named = eq.load_data(f"{functions}:by_name", seed=7, size=3, clients=3)
    assert named.names == ("ward 0", "ward 1", "ward 2")
    assert float(named.x.min()) == 7
    assert [len(named.train[k]) + len(named.test[k]) + len(named.validation[k]) for k in range(3)] == [3, 3, 3]


def test_a_function_may_return_a_federation_a_pool_or_arrays(functions: str) -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 3
    given, found = (
        eq.from_clients([(x[:8], y[:8]), (x[8:], y[8:])], names=["p", "q"]),
        eq.load_data(f"{functions}:federation"),
    )
    for who in (0, 1):
        for split in SPLITS:
            assert rows_of(found, who, split) == rows_of(given, who, split)
    for name in ("pool", "arrays"):
        dealt = eq.load_data(f"{functions}:{name}", clients=4, partition={"kind": "iid"})
        assert (len(dealt), len(dealt.y), dealt.classes) == (4, 20, 3)
        said(("needs data with known owners",), lambda name=name: eq.load_data(f"{functions}:{name}"))
    assert len(eq.load_data(f"{functions}:Mine", rows=6, clients=2, partition={"kind": "iid"}).y) == 6


def test_paths_are_found_beside_the_experiment(functions: str, tmp_path: Path) -> None:
    (tmp_path / "label.txt").write_text("2")
    experiment = Experiment.parse(
        small() | {"data": {"name": "functions.py:files", "place": "label.txt"}},
        folders=[tmp_path],
    )
    assert experiment.federation(Path("nowhere")).y.unique().tolist() == [2]
    assert experiment.tables()["data"]["place"] == "label.txt"
    said(
        ("data.place = 'label.txt' does not exist in", str(tmp_path / "data")),
        lambda: eq.load_data(f"{functions}:files", place="label.txt", data=tmp_path / "data"),
    )


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("by_name", {"sise": 3}, ("unknown setting data.sise; did you mean 'size'?",)),
        ("by_name", {"size": "x"}, ("data.size = 'x' is not allowed; it must be a whole number",)),
        ("nothing", {}, ("functions.py:nothing' returned int; it must return the clients as equipoise.train",)),
        ("fails", {}, ("functions.py:fails' failed: ValueError: the disk",)),
        ("held_out", {}, ("the federation has unseen clients; leave them to the setting data.unseen",)),
        ("most", {}, ("has an argument 'most', which cannot be a setting",)),
        ("files", {}, ("data.place is missing",)),
        ("X", {}, ("is of type ndarray; it must be a function that returns the clients",)),
    ],
)
def test_functions_that_cannot_be_used_bring_a_sentence(
    name: str, settings: dict[str, Any], words: tuple[str, ...], functions: str
) -> None:
    said(words, lambda: eq.load_data(f"{functions}:{name}", **settings))
