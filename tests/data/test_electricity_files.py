"""Loads by client: windows, scaling and the split in time, and tables that are not right."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.errors import EquipoiseError
from tests.support import datafiles
from tests.support.datafiles import load


def test_electricity_windows_and_scaling(tmp_path: Path) -> None:
    series = datafiles.electricity(tmp_path / "electricity.csv.gz")
    pool = load("electricity", tmp_path, split=(0.6, 0.2, 0.2), window=10, horizon=2)
    assert pool.portion == "4 of 321 clients, 200 of 26,304 moments"
    assert pool.owners is not None
    assert pool.part is not None
    for column, name in enumerate(["0", "1", "2", "OT"]):
        mine = pool.owners == name
        # 189 windows: 113, 38 and 38; those whose targets lie on both sides of a cut are dropped.
        low, high = series[:123, column].min(), series[:123, column].max()  # by the training part alone
        scaled = (series[:, column] - low) / (high - low)
        x, y, part = pool.x[mine].numpy(), pool.y[mine].numpy(), pool.part[mine]
        starts = [t for t in range(10, 199) if t not in (122, 160)]
        np.testing.assert_allclose(x, [scaled[t - 10 : t] for t in starts], atol=1e-6)
        np.testing.assert_allclose(y, [scaled[t : t + 2] for t in starts], atol=1e-6)
        assert part.tolist() == [0 if t < 123 else 1 if t < 161 else 2 for t in starts]
    standard = load("electricity", tmp_path, split=(0.6, 0.2, 0.2), scale="standard", window=1)
    first = (standard.owners == "0") & (standard.part == 0)
    past = np.concatenate([standard.x[first].numpy()[:1, 0], standard.y[first].numpy()[:, 0]])
    assert abs(past.mean()) < 1e-5
    assert abs(past.std() - 1) < 1e-5


@pytest.mark.parametrize("zipped", [True, False])
def test_ucis_quarter_hours_with_decimal_commas(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / ("electricity.zip" if zipped else "LD2011_2014.txt")
    series = datafiles.uci(path, zipped=zipped)
    hourly = series.reshape(-1, 4, 3).mean(1)
    for settings, truth in (({}, hourly), ({"hourly": False}, series)):
        pool = load("electricity", tmp_path, split=(1.0, 0.0, 0.0), window=4, **settings)
        mine = pool.owners == "MT_002"
        low, high = truth[:, 1].min(), truth[:, 1].max()
        np.testing.assert_allclose(pool.y[mine].numpy()[:, 0], (truth[4:, 1] - low) / (high - low), atol=1e-5)


@pytest.mark.parametrize(("row", "cell"), [(30, "2016-07-02 09:00:00"), (40, "garbage"), (20, "2016-07-01 02:00:00")])
def test_every_moment_follows_the_one_before(row: int, cell: str, tmp_path: Path) -> None:
    """Were rows out of order, the future would be trained on."""
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00:00,{h},{h + 1}" for h in range(48)]
    rows[row] = f"{cell},1,2"
    (tmp_path / "electricity.csv").write_text("\n".join(["date,0,OT", *rows]))
    with pytest.raises(EquipoiseError, match=f"row {row + 2}: '{cell}' is"):
        load("electricity", tmp_path)


def test_lines_ends_and_marks_of_other_systems(tmp_path: Path) -> None:
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00:00,{h % 7},{h % 5}" for h in range(48)]
    plain = "\n".join(["date,0,OT", *rows])
    (tmp_path / "electricity.csv").write_text(plain)
    one = load("electricity", tmp_path)
    (tmp_path / "electricity.csv").write_bytes(b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    assert torch.equal(load("electricity", tmp_path).x, one.x)


@pytest.mark.slow
def test_a_table_that_unpacks_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    head = b"date,0,OT\n2016-07-01 00:00:00,1,2\n2016-07-01 01:00:00,1,2\n"
    (tmp_path / "electricity.csv.gz").write_bytes(gzip.compress(head + b"\n" * 50_000_000))
    with pytest.raises(EquipoiseError):  # in no time: the empty rows are not walked through
        load("electricity", tmp_path)
    (tmp_path / "mnist").mkdir()
    datafiles.everything(tmp_path / "whole")
    path = tmp_path / "whole" / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(100_000_000)))
    with pytest.raises(EquipoiseError, match="more than the 47040 bytes"):
        load("mnist", tmp_path / "whole")


def test_loads_before_the_first_and_dead_clients_are_no_data(tmp_path: Path) -> None:
    rows = [f"2016-07-01 {h:02d}:00:00,{0 if h < 5 else 7 + h % 3},0,{h}" for h in range(24)]
    (tmp_path / "electricity.csv").write_text("\n".join(["date,a,b,OT", *rows]))
    pool = load("electricity", tmp_path, window=2, split=(0.5, 0.25, 0.25))
    assert set(pool.owners) == {"a", "OT"}  # type: ignore[arg-type]
    assert (pool.owners == "a").sum() == 24 - 5 - 2
    assert "1 clients are left out" in pool.notes[0]
    late = [f"2016-07-01 {h:02d}:00:00,{0 if h < 22 else h},{h}" for h in range(24)]
    (tmp_path / "electricity.csv").write_text("\n".join(["date,late,OT", *late]))
    assert set(load("electricity", tmp_path, window=2).owners) == {"OT"}


@pytest.mark.parametrize(
    ("cell", "shown"),
    [*((c, repr(c)) for c in ("NaN", "", "inf", "12x", "#3", "1_000", "1e39"))],
)
def test_a_bad_cell_is_named_with_row_and_column(cell: str, shown: str, tmp_path: Path) -> None:
    rows = [f"2016-07-{1 + h // 24:02d} {h % 24:02d}:00:00,{h},{h + 1},{h + 2}" for h in range(48)]
    rows[30] = f"2016-07-02 06:00:00,1,{cell},3"
    (tmp_path / "electricity.csv").write_text("\n".join(["date,0,1,OT", *rows]))
    with pytest.raises(EquipoiseError, match=rf"row 32, column '1': {shown} is not a finite number"):
        load("electricity", tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["date,0,OT", "2016-07-01 00:00:00,1,2", "2016-07-01 01:00:00,1"], "row 3: 1 values for 2 clients"),
        (["date,0,OT", "2016-07-01 00:00:00,1,2", "2016-07-01 00:07:00,1,2"], "a value every 7 minutes"),
        (["date,0,OT", "yesterday,1,2"], "row 2: 'yesterday' is not a date"),
        (["date,0,0", "2016-07-01 00:00:00,1,2"], "names a client twice"),
        (["1,2,3"], "does not begin with a line of names"),
        (["date,0,OT", *(f"2016-07-01 {h:02d}:00:00,{h},{h}" for h in range(9))], "no client has training samples"),
        (["date,0", *(f"2016-07-{d:02d} {h:02d}:00:00,7" for d in (1, 2) for h in range(24))], "values that change"),
        (["date,0", "2016-07-01 00:00:30,1"], "not a date and time in whole minutes"),
        (["date,0", "2016-07-01 00:00:00+01:00,1"], "not a date and time in whole minutes"),
        (["date,0,OT", "2016-07-01 00:00:00,1,2", "", "2016-07-01 01:00:00,1,2"], "row 3 is empty"),
        (["date,\x07,OT", "2016-07-01 00:00:00,1,2"], "cannot be a client's name"),
        (["date,0,OT" + "," * 70_000], "a load table cannot be that long"),
    ],
)
def test_electricity_says_what_is_wrong(lines: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "electricity.csv").write_text("\n".join(lines))
    with pytest.raises(EquipoiseError, match=message):
        load("electricity", tmp_path)
