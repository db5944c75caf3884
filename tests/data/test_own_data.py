"""The user's own data: folders of files, and functions."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import equipoise as eq
from equipoise.data import table_files
from equipoise.data.federation import Federation
from equipoise.data.table_files import read_columns
from equipoise.errors import EquipoiseError
from tests.support.commands import is_one_sentence

HEADER = "age,pressure,diagnosis\n"
ROWS = {"a": "30,1.5,ill\n40,2.5,well\n50,3,ill\n", "b": "60,4,unsure\n70,5,well\n80,6.5,well\n"}
SPLITS = ("train", "validation", "test")


def wards(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return wards(tmp_path / "wards", **{name: HEADER + rows for name, rows in ROWS.items()})


def load(path: Path, **settings: Any) -> Federation:
    return eq.load_data("folder", path=str(path), split=[1.0, 0.0, 0.0], **settings)


def rows_of(federation: Federation, who: int, split: str = "train") -> tuple[list[list[float]], list[Any]]:
    x, y = federation.gather(torch.from_numpy(np.sort(getattr(federation, split)[who])))
    return x.tolist(), y.tolist()


def said(words: tuple[str, ...], act: Callable[[], object]) -> None:
    with pytest.raises(EquipoiseError) as caught:
        act()
    is_one_sentence(caught.value, *words)


def test_text_labels_are_classes_in_sorted_order_for_all_clients(two: Path) -> None:
    found = load(two, target="diagnosis")
    assert (found.names, found.classes, found.title) == (("a", "b"), 3, "wards")
    assert rows_of(found, 0) == ([[30, 1.5], [40, 2.5], [50, 3]], [0, 2, 0])
    assert rows_of(found, 1) == ([[60, 4], [70, 5], [80, 6.5]], [1, 2, 2])
    other = load(two, target="diagnosis", classes=["well", "unsure", "ill", "dead"])
    assert (rows_of(other, 0)[1], other.classes) == ([2, 0, 2], 4)


def test_the_target_may_be_numbers_or_whole_numbers(two: Path) -> None:
    found = load(two, target="pressure", features=["age"])
    assert (rows_of(found, 0), found.classes, found.outputs) == (([[30], [40], [50]], [[1.5], [2.5], [3]]), None, 1)
    assert load(two, target="age", features=["pressure"]).classes == 81
    numbers = load(two, target="age", features=["pressure"], labels=False)
    assert (numbers.classes, rows_of(numbers, 1)[1]) == (None, [[60], [70], [80]])
    pair = wards(two.parent / "pair", a="u,v,w\n1,2,3\n4,5,6\n")
    assert rows_of(load(pair, target=["v", "u"]), 0) == ([[3], [6]], [[2, 1], [5, 4]])


def write(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write the same samples in the format of the file's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.array([columns["u"], columns["v"]], dtype=float).T
    y = np.array(columns["label"])
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    elif path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".npz":
        np.savez(path, x=x, y=y)
    else:
        save_file({"x": np.ascontiguousarray(x), "y": y}, path)


COLUMNS = {"u": [1.5, 2.0, 3.25], "v": [0.0, -1.0, 7.0], "label": [1, 0, 2]}
MORE = {"label": [0, 0], "v": [5.0, 6.0], "u": [8.0, 9.0]}


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz", ".safetensors"])
def test_every_format_and_layout_gives_the_same_samples(suffix: str, tmp_path: Path) -> None:
    table = {"target": "label"} if suffix in (".csv", ".parquet") else {}
    write(tmp_path / "flat" / f"a{suffix}", COLUMNS)
    write(tmp_path / "flat" / f"b{suffix}", MORE)
    flat = load(tmp_path / "flat", **table)
    expected = ([[1.5, 0], [2, -1], [3.25, 7]], [1, 0, 2])
    assert (rows_of(flat, 0), rows_of(flat, 1)) == (expected, ([[8, 5], [9, 6]], [0, 0]))
    for name in ("a", "b"):
        write(tmp_path / "parts" / "train" / f"{name}{suffix}", COLUMNS)
        write(tmp_path / "inside" / name / f"train{suffix}", COLUMNS)
    write(tmp_path / "parts" / "test" / f"b{suffix}", MORE)
    write(tmp_path / "inside" / "b" / f"test{suffix}", MORE)
    for layout in ("parts", "inside"):
        found = load(tmp_path / layout, **table)
        assert rows_of(found, 0) == rows_of(found, 1) == expected
        assert rows_of(found, 1, "test") == ([[8, 5], [9, 6]], [0, 0])
        assert [len(found.test[k]) for k in (0, 1)] == [0, 2]
        assert found.classes == 3


def test_undivided_files_are_split_as_the_same_clients_in_python(two: Path) -> None:
    found = eq.load_data("folder", path=str(two), target="diagnosis", split=[0.4, 0.3, 0.3], seed=5)
    clients = [
        (torch.tensor(x), torch.tensor(y)) for x, y in (rows_of(load(two, target="diagnosis"), k) for k in (0, 1))
    ]
    same = eq.from_clients(clients, names=["a", "b"], split=[0.4, 0.3, 0.3], seed=5)
    for split in SPLITS:
        for who in (0, 1):
            assert rows_of(found, who, split) == rows_of(same, who, split)


def test_arrays_may_be_divided_inside_a_file_and_other_files_are_noted(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        **{"train.x": np.ones((3, 2)), "train.y": [0, 1, 0], "test.x": np.zeros((1, 2)), "test.y": [1]},
    )
    (tmp_path / "README.md").write_text("what this is")
    (tmp_path / ".hidden.csv").write_text("")
    found = load(tmp_path)
    assert [len(getattr(found, split)[0]) for split in SPLITS] == [3, 0, 1]
    assert found.notes == ("files that are no data are not used: README.md",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("30,1,ill\nold,2,ill\n", ("a.csv, line 3: the column 'age' has the text 'old', where a number is needed",)),
        ("30,,ill\n", ("a.csv, line 2: the column 'pressure' is empty",)),
        ("30,1,\n", ("a.csv, line 2: the column 'diagnosis' is empty",)),
        ("30,nan,ill\n", ("a.csv, line 2: the column 'pressure' is nan",)),
        ("30,1,ill\n\n30,1e999,ill\n", ("a.csv, line 4: the column 'pressure' is 1e999",)),
        ("30,1,5,ill\n", ("a.csv, line 2 has 4 values, but the header names 3 columns",)),
        ("30,ill\n", ("a.csv, line 2 has 2 values",)),
        ("", ("a.csv has no samples, only the names of its columns",)),
        ("3_0,1,ill\n", ("line 2: the column 'age' has the text '3_0'",)),
    ],
)
def test_a_wrong_value_is_told_with_file_line_and_column(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    wards(tmp_path, a=HEADER + text)
    said((str(tmp_path), *words), lambda: load(tmp_path, target="diagnosis"))


@pytest.mark.parametrize(
    ("files", "settings", "words"),
    [
        ({"a": "u,v\n1,2\n"}, {}, ("data.target is missing", "a.csv", "it has u, v")),
        ({"a": "u,v\n1,2\n"}, {"target": "w"}, ("a.csv has no column 'w' (data.target); it has u, v",)),
        ({"a": "u,v\n1,2\n", "b": "u,w\n1,2\n"}, {"target": "u"}, ("b.csv has no column 'v', which", "a.csv has")),
        ({"a": "u,v\n1,2\n", "b": "u,v,w\n1,2,3\n"}, {"target": "u"}, ("b.csv has the column 'w', which", "has not")),
        ({"a": "u,v\n1,2\n"}, {"target": "u", "features": ["x"]}, ("no column 'x', which data.features names",)),
        ({"a": "u,v\n1,2\n"}, {"target": "u", "features": ["u"]}, ("data.features has 'u', which is the target",)),
        ({"a": "u\n1\n"}, {"target": "u"}, ("a.csv has no columns besides the target u",)),
        ({"a": ",u\n1,2\n"}, {"target": "u"}, ("a.csv: column 1 has no name", "index=False")),
        ({"a": "u,u\n1,2\n"}, {"target": "u"}, ("a.csv: two columns are named 'u'",)),
        ({"a": ""}, {"target": "u"}, ("a.csv has no header",)),
        ({"a": "u,v\n1,x\n", "b": "u,v\n1,2\n"}, {"target": "v"}, ("b.csv: the column 'v' has numbers, but that of",)),
        ({"a": "u,v\n1,x\n"}, {"target": "v", "labels": False}, ("has the text 'x', but data.labels = false",)),
        (
            {"a": "u,v\n1,x\n"},
            {"target": "v", "classes": ["y"]},
            ("the label 'x', which is not one of data.classes: y",),
        ),
        (
            {"a": "u,v\n1,-1\n"},
            {"target": "v"},
            ("a.csv: the column 'v' has -1, but labels are 0, 1, 2", "labels = false"),
        ),
        ({"a": "u,v\n1,1.5\n"}, {"target": "v", "labels": True}, ("the column 'v' has 1.5, but labels are",)),
        ({}, {}, ("has no data: put one file per client there",)),
    ],
)
def test_files_that_do_not_fit_are_told(
    files: dict[str, str], settings: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    wards(tmp_path / "wards", **files)
    said(words, lambda: load(tmp_path / "wards", **settings))


def test_other_things_that_cannot_work_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said(("data.path = ", "is not a folder"), lambda: load(tmp_path / "nowhere"))
    said(("the data folder", "does not exist"), lambda: eq.load_data("folder", data=tmp_path / "nowhere"))
    said(("unknown setting data.pth; did you mean 'path'?",), lambda: eq.load_data("folder", pth="x"))
    folder = wards(tmp_path / "wards", a="u,v\n1,2\n")
    np.savez(folder / "a.npz", x=[[1.0]], y=[1])
    said(("a.csv and a.npz have one name",), lambda: load(folder, target="u"))
    bad = tmp_path / "bad"
    bad.mkdir()
    np.savez(bad / "a.npz", x=np.array([[1.0, 2.0], [3.0, np.nan]]), y=[0, 1])
    said(("a.npz: there is NaN or infinity in x, column 2, first in sample 2",), lambda: load(bad))
    wards(tmp_path / "parts" / "train", a="u,v\n1,2\n")
    wards(tmp_path / "parts" / "test", b="u,v\n1,2\n")
    said(("b.csv has no counterpart in", "train"), lambda: load(tmp_path / "parts", target="u"))
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "a.csv").write_bytes(b"u,v\n1,\xff\n")
    said(("a.csv cannot be read as CSV in UTF-8",), lambda: load(tmp_path / "bytes", target="u"))


def test_parquet_is_read_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(**columns: Any) -> None:
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")

    act = lambda: load(tmp_path, target="y")  # noqa: E731
    put(x=[1, 2], y=pa.array(["b", "a"]).dictionary_encode())
    assert rows_of(act(), 0) == ([[1], [2]], [1, 0])
    put(x=[True, False], y=pa.array([1, 2], pa.int8()))
    assert rows_of(act(), 0) == ([[1], [0]], [1, 2])
    put(x=[1.0, None], y=[1, 2])
    said(("a.parquet: the column 'x' is empty in sample 2",), act)
    put(x=[1.0, float("inf")], y=[1, 2])
    said(("a.parquet: the column 'x' has NaN or infinity, first in sample 2",), act)
    put(x=["s", "t"], y=[1, 2])
    said(("a.parquet: the column 'x' has the type string, where a number is needed",), act)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    said(("a.parquet cannot be read as Parquet",), act)
    monkeypatch.setattr(table_files, "find_spec", lambda name: None)
    said(("a.parquet needs pyarrow", "pip install 'equipoise[parquet]'"), act)


@given(
    st.lists(
        st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 2, st.sampled_from(["x", "y z", 'q"q', "1,5"])),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(",;\t"),
)
def test_what_csv_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, float, str]], delimiter: str
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows([("u", "v", "label"), *rows])
    found = read_columns(path, ["v", "u", "label"], ["label"], delimiter)
    u, v, label = zip(*rows, strict=True)
    assert (found["u"].tolist(), found["v"].tolist(), found["label"].tolist()) == (list(u), list(v), list(label))
    numbers = read_columns(path, ["u"], (), delimiter)
    assert numbers["u"].tolist() == list(u)
