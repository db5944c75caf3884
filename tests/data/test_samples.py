"""Clients' samples as users give them: what is accepted, and the errors for the rest."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import equipoise as eq
from tests.support.commands import is_one_sentence

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 4)).astype("float32"), RNG.integers(0, 3, 20)


class Samples(Dataset):
    def __init__(self, get):
        self.get = get

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int):
        return self.get(i)


class DataFrame:
    """As much of pandas as matters here."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def to_numpy(self) -> np.ndarray:
        return self.array

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, column: str):
        raise KeyError(column)


def fails(i: int) -> None:
    raise ZeroDivisionError("i / 0")


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ({"train": (X, Y), "test": (X, Y)}, "are the parts of one client's samples"),
        ({}, "the list of clients is empty"),
        ([], "the list of clients is empty"),
        ((X, Y), "clients is one pair (x, y); give a list"),
        ([torch.tensor(X), Y], "clients is one pair (x, y); give a list"),
        (X, "clients is of type ndarray; it must be a list"),
        ("data.csv", "clients is of type str"),
        (TensorDataset(torch.tensor(X), torch.tensor(Y)), "clients is of type TensorDataset"),
        (DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y))), "clients is of type DataLoader"),
        ([DataLoader(TensorDataset(torch.tensor(X)))], "is a DataLoader; give its dataset"),
        ([X], "client 'client-0' is one ndarray; it must be a pair"),
        ([DataFrame(X)], "is one DataFrame; it must be a pair of arrays (x, y) (such as frame[columns]"),
        ([None], "client 'client-0' is None"),
        ([5], "client 'client-0' is of type int"),
        (["ab"], "client 'client-0' is of type str"),
        ([(X, Y, Y)], "has 3 entries; it must be a pair"),
        ([list(zip(X, Y, strict=True))], "has 20 entries; it must be a pair"),
        ([(X, None)], "the targets of client 'client-0' are None"),
        ([(3.0, 1)], "the inputs of client 'client-0' are a single value"),
        ([(torch.tensor(1.0), torch.tensor(1))], "the inputs of client 'client-0' are a single value"),
        ([(X, Y[:3])], "has 20 inputs and 3 targets"),
        ([(X[:0], Y[:0])], "has no training samples"),
        ([([[1, 2], [3]], [0, 1])], "the inputs of client 'client-0' are not an array of numbers"),
        ([(X.astype(object), Y)], "the inputs of client 'client-0' are objects (dtype object); convert them"),
        ([(X, np.array(["a", "b"] * 10))], "are strings (dtype <U1); number the classes from 0"),
        ([(X, np.full(20, "2020-01-01", dtype="M8[D]"))], "are dates"),
        ([(X + 1j, Y)], "are complex numbers"),
        ([Samples(lambda i: (X[i], X[i], Y[i]))], "has 3 parts; it must be a pair (x, y)"),
        ([Samples(lambda i: {"x": X[i]})], "has the type dict; it must be a pair (x, y)"),
        ([Samples(lambda i: (X[i][: i + 1], Y[i]))], "the inputs of client 'client-0' cannot be stacked"),
        ([Samples(fails)], "fails at sample 0: ZeroDivisionError: i / 0"),
    ],
)
def test_wrong_kinds_of_clients_are_said(clients, words: str) -> None:
    with pytest.raises(eq.EquipoiseError) as error:
        eq.from_clients(clients)
    is_one_sentence(error.value, words)


@pytest.mark.parametrize("split", [0.7, "abc", (0.7, 0.3), None, ("a", "b", "c")])
def test_a_split_is_three_fractions(split) -> None:
    with pytest.raises(eq.EquipoiseError, match="it must be three fractions"):
        eq.from_clients([(X, Y)], split=split)


def test_clients_by_name_are_those_of_a_list_with_names() -> None:
    by_name = eq.from_clients({"a": (X, Y), "7": (X[:9], Y[:9])})
    listed = eq.from_clients([(X, Y), (X[:9], Y[:9])], names=["a", "7"])
    assert by_name.names == ("a", "7")
    assert by_name.fingerprint(splits=True) == listed.fingerprint(splits=True)
    assert eq.from_clients({0: (X, Y), 1: (X, Y)}).names == ("0", "1")
    with pytest.raises(eq.EquipoiseError, match="clients has the number 1 as a key"):
        eq.from_clients({1: (X, Y), 0: (X, Y)})
    with pytest.raises(eq.EquipoiseError, match="the keys of clients are their names already"):
        eq.from_clients({"a": (X, Y)}, names=["b"])
    with pytest.raises(eq.EquipoiseError, match="names = 'ab' is not allowed"):
        eq.from_clients([(X, Y), (X, Y)], names="ab")


@pytest.mark.parametrize(
    "turn",
    [
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        lambda a: a[::-1][::-1],
        lambda a: a.tolist(),
        lambda a: [torch.tensor(row) for row in a],
        lambda a: DataFrame(a),
        lambda a: a.astype("float64" if a.dtype.kind == "f" else "uint16"),
        lambda a: torch.tensor(a, requires_grad=a.dtype.kind == "f"),
        lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
    ],
    ids=["big-endian", "strides", "lists", "list of tensors", "frame", "wider", "with gradient", "read-only"],
)
@pytest.mark.filterwarnings("error")
def test_arrays_of_all_sorts_are_the_same_samples(turn) -> None:
    usual, other = eq.from_clients([(X, Y)]), eq.from_clients([(turn(X), turn(Y))])
    assert torch.equal(other.x.float(), usual.x)
    assert torch.equal(other.y, usual.y)
    assert not other.x.requires_grad
