"""The user's own loads: tables and folders, daylight saving, gaps, averages, and bad files."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from equipoise.data.config import load_data
from equipoise.data.pool import Pool
from equipoise.errors import EquipoiseError
from tests.support.datafiles import load

LISBON = ZoneInfo("Europe/Lisbon")
SPRING = datetime(2014, 3, 25, tzinfo=UTC)  # clocks are put forward on 30 March
AUTUMN = datetime(2014, 10, 20, tzinfo=UTC)  # and back on 26 October
FORMS: dict[str, Callable[[datetime], str]] = {
    "clock": lambda moment: f"{moment.astimezone(LISBON):%Y-%m-%d %H:%M}",
    "offsets": lambda moment: moment.astimezone(LISBON).isoformat(),
    "utc": lambda moment: f"{moment:%Y-%m-%dT%H:%M}Z",
}


def moments(start: datetime, count: int, step: int = 60) -> list[datetime]:
    return [start + timedelta(minutes=step * k) for k in range(count)]


def day_shape(moment: datetime) -> float:
    """A load that depends on the local hour."""
    return 10 + moment.astimezone(LISBON).hour + moment.minute / 100


def write(path: Path, times: Sequence[str], columns: dict[str, Sequence[Any]], delimiter: str = ",") -> Path:
    rows = [delimiter.join(["time", *columns])]
    rows += [delimiter.join(map(str, row)) for row in zip(times, *columns.values(), strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def plain(hours: int) -> list[str]:
    return [f"{moment:%Y-%m-%d %H:%M}" for moment in moments(datetime(2014, 6, 2), hours)]


def loads(path: Path, **settings: Any) -> Pool:
    return load("loads", path.parent, path=str(path), **{"window": 3, **settings})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", [SPRING, AUTUMN])
@pytest.mark.parametrize("step", [15, 30, 60])
def test_the_clock_of_the_place_is_known_through_daylight_saving(
    form: str, start: datetime, step: int, tmp_path: Path
) -> None:
    when = moments(start, 10 * 24 * 60 // step, step)
    values = [day_shape(moment) for moment in when]
    path = write(tmp_path / "site.csv", [FORMS[form](moment) for moment in when], {"a": values, "b": values[::-1]})
    pool = loads(path, timezone="Europe/Lisbon", calendar=["hour"], scale="none", split=(1.0, 0.0, 0.0))
    facts = pool.series
    assert facts is not None
    assert not pool.notes
    assert (facts.step, facts.zone, len(facts.values)) == (step, "Europe/Lisbon", 2 * len(when))
    hours = pool.x[pool.owner == 0, 3:].argmax(1)
    assert (pool.y[pool.owner == 0, 0].int() - 10).tolist() == hours.tolist()
    shown = [facts.time(0, place) for place in facts.target[pool.owner == 0]]
    assert shown == [moment.astimezone(LISBON).replace(tzinfo=None) for moment in when[3:]]


def test_hours_that_do_not_exist_may_be_zero_or_empty(tmp_path: Path) -> None:
    times = [f"2014-03-{day} {hour:02d}:00" for day in (29, 30, 31) for hour in range(24)]
    for cell in ("", "0"):
        values = [cell if time == "2014-03-30 01:00" else str(k % 7 + 1) for k, time in enumerate(times)]
        path = write(tmp_path / "table.csv", times, {"a": values})
        pool = loads(path, timezone="Europe/Lisbon", scale="none")
        assert pool.series is not None
        assert pool.series.values.tolist() == [float(value) for value in values if value not in ("", "0")]
        assert not pool.notes
    write(path, times, {"a": [str(k % 7 + 1) for k in range(72)]})
    with pytest.raises(EquipoiseError, match=r"row 27: 2014-03-30 01:00 does not exist in data.timezone"):
        loads(path, timezone="Europe/Lisbon")


def test_a_table_and_a_folder_of_files_are_the_same(tmp_path: Path) -> None:
    times, columns = plain(100), {name: np.random.default_rng(k).random(100) for k, name in enumerate("ab")}
    weather = np.random.default_rng(9).random(100)
    table = write(tmp_path / "table.csv", times, {**columns, "temperature": weather})
    for name, values in columns.items():
        write(tmp_path / "sites" / f"{name}.csv", times, {"temperature": weather, "load": values})
    (tmp_path / "sites" / "readme.txt").write_text("not a table")
    options = {"exogenous": ["temperature"], "calendar": ["hour"]}
    one, two = loads(table, **options), loads(tmp_path / "sites", target="load", **options)
    assert one.names == two.names == ("a", "b")
    assert np.array_equal(one.x, two.x)
    assert np.array_equal(one.y, two.y)
    assert two.notes == ("files that are no data are not used: readme.txt",)


def test_exogenous_values_are_those_of_the_first_target_or_the_last_known(tmp_path: Path) -> None:
    weather = np.random.default_rng(0).random(50)
    path = write(tmp_path / "table.csv", plain(50), {"a": np.random.default_rng(1).random(50), "temperature": weather})
    for known, shift in ((True, 0), (False, -1)):
        weathered = {"exogenous": ["temperature"], "exogenous_known": known}
        pool = loads(path, **weathered)
        facts = pool.series
        assert facts is not None
        past = weather[: facts.trained_until[0]]
        scaled = (weather - past.min()) / np.ptp(past)
        np.testing.assert_allclose(pool.x[:, 3], scaled[facts.target + shift], atol=1e-6)
        expected = [scaled[t - 2 + shift : t + 1 + shift] for t in facts.target]
        np.testing.assert_allclose(loads(path, **weathered, layout="sequence").x[:, :, 1], expected, atol=1e-6)


def test_decimal_commas_other_notations_and_words_for_missing(tmp_path: Path) -> None:
    times = [f"{moment:%d.%m.%Y %H:%M}" for moment in moments(datetime(2014, 6, 2), 30)]
    cells = [f"{k % 5},25" for k in range(30)]
    cells[20] = "NA"
    path = write(tmp_path / "table.csv", times, {"a": cells}, delimiter=";")
    pool = loads(path, delimiter=";", decimal=",", time_format="%d.%m.%Y %H:%M", scale="none")
    assert pool.series is not None
    expected = [np.nan if k == 20 else k % 5 + 0.25 for k in range(30)]
    np.testing.assert_array_equal(pool.series.values, np.float32(expected))
    assert pool.notes == ("table.csv: 1 value of 'a' is missing, the first after row 21, 2014-06-02 20:00",)


def test_averages_are_of_full_hours_on_the_clock_of_the_place(tmp_path: Path) -> None:
    when = moments(datetime(2014, 6, 1, 0, 45, tzinfo=UTC), 4 * 50, 15)  # in Kolkata it is 06:15
    values = np.arange(200.0)
    write(path := tmp_path / "table.csv", [FORMS["utc"](moment) for moment in when], {"a": values})
    pool = loads(path, timezone="Asia/Kolkata", resample=60, scale="none")
    facts = pool.series
    assert facts is not None
    assert facts.time(0, 0) == datetime(2014, 6, 1, 7, 0)
    assert facts.values.tolist() == values[3:199].reshape(-1, 4).mean(1).tolist()


def test_gaps_are_named_skipped_or_filled(tmp_path: Path) -> None:
    times = plain(100)
    values = [str(k % 10) for k in range(100)]
    values[40] = ""
    kept = [k for k in range(100) if k not in (60, 61, 62)]
    path = write(tmp_path / "sites" / "a.csv", [times[k] for k in kept], {"load": [values[k] for k in kept]})
    skipped = loads(path.parent, scale="none")
    note = "a.csv: 4 values are missing, the first after row 41, 2014-06-03 16:00"
    assert skipped.notes == (note,)
    missing = {40, 60, 61, 62}
    facts = skipped.series
    assert facts is not None
    assert facts.target.tolist() == [t for t in range(3, 100) if not missing & set(range(t - 3, t + 1))]
    assert np.flatnonzero(np.isnan(facts.values)).tolist() == sorted(missing)
    filled = loads(path.parent, scale="none", gaps="interpolate", longest_gap=1)
    assert filled.series is not None
    more = set(filled.series.target.tolist()) - set(facts.target.tolist())
    assert more == {42, 43}  # not 40, which nobody measured, and not 41, whose input would be made of it
    at = filled.series.target.tolist().index(43)
    assert filled.x[at].tolist() == [5.0, 1.0, 2.0]  # between 9 and 1
    with pytest.raises(EquipoiseError, match=f"{note}; fill them in, or set data.gaps"):
        loads(path.parent, gaps="error")


def test_notes_about_many_gaps_are_few(tmp_path: Path) -> None:
    columns = {f"c{k}": ["" if row == 10 else row % 7 for row in range(60)] for k in range(9)}
    pool = loads(write(tmp_path / "table.csv", plain(60), columns))
    assert len(pool.notes) == 6
    assert pool.notes[-1] == "4 more series have gaps"


def test_clients_come_and_go_and_some_cannot_be_used(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    late = ["" if k < 30 else f"{rng.random():.3f}" for k in range(90)]
    columns = {"late": late, "early": late[::-1], "constant": [5] * 90, "empty": [""] * 90}
    pool = loads(write(tmp_path / "table.csv", plain(90), columns))
    assert pool.notes == ("2 clients are left out: too few values, or none that change, to train on: constant, empty",)
    facts = pool.series
    assert facts is not None
    assert np.diff(facts.begins).tolist() == [60, 60, 0, 0]
    assert facts.time(0, facts.begins[0]) == datetime(2014, 6, 3, 6)


def test_parquet_tables(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    when = moments(AUTUMN, 10 * 24)
    values = [None if k == 50 else day_shape(moment) for k, moment in enumerate(when)]
    arrays = {"when": pyarrow.array(when, pyarrow.timestamp("ns", "Europe/Lisbon")), "a": values}
    parquet.write_table(pyarrow.table(arrays), tmp_path / "table.parquet")
    texts = ["" if value is None else value for value in values]
    write(tmp_path / "table.csv", [FORMS["offsets"](moment) for moment in when], {"a": texts})
    options = {"timezone": "Europe/Lisbon", "calendar": ["hour"]}
    one, two = (loads(tmp_path / f"table.{kind}", **options) for kind in ("parquet", "csv"))
    assert np.array_equal(one.x, two.x)
    assert one.notes == ("table.parquet: 1 value of 'a' is missing, the first after row 50, 2014-10-22 03:00",)


def test_loads_are_a_federation_in_python(tmp_path: Path) -> None:
    write(tmp_path / "table.csv", plain(80), {"a": np.arange(80) % 9, "b": np.arange(80) % 7})
    federation = load_data("loads", path=str(tmp_path / "table.csv"), window=4, data=tmp_path)
    assert federation.names == ("a", "b")
    assert federation.title == "table.csv"
    assert federation.series is not None


TWO = ["2014-06-02 00:00,1,2", "2014-06-02 01:00,1,2"]


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ([], {}, "has no header"),
        (["time,a"], {}, "has 0 moments"),
        (["time;a", *TWO], {}, r"no column of loads beside 'time;a'; .* set data.delimiter = ';'"),
        (["time,a,b", *TWO], {"time": "tim"}, r"no column 'tim' \(data.time\); did you mean 'time'"),
        (["time,a,b", *TWO], {"exogenous": ["c"]}, r"no column 'c' \(data.exogenous\)"),
        (["time,a,b", *TWO], {"exogenous": ["time"]}, "'time', which is the column of times"),
        (["time,a,b", *TWO], {"target": "a"}, "data.target = 'a' is for a folder with one file per client"),
        (["time,a,a", *TWO], {}, "two columns are named 'a'"),
        (["time,a,b", "yesterday,1,2"], {}, "row 2: 'yesterday' is not a date and time .* data.time_format"),
        (["time,a,b", "1.6.14,1,2"], {"time_format": "%Y"}, "in the notation data.time_format = '%Y'"),
        (["time,a,b", *TWO, "2014-06-02 02:00,1"], {}, "row 4 has 2 values, but the header names 3 columns"),
        (["time,a,b", *TWO, "2014-06-02 02:00,x,1"], {}, "row 4, column 'a': 'x' is not a number"),
        (["time,a,b", *TWO, "2014-06-02 02:00,1_0,1"], {}, "row 4, column 'a': '1_0' is not a number"),
        (["time,a,b", *TWO, "2014-06-02 02:00,1,inf"], {}, "row 4, column 'b': infinity is not a number"),
        (["time,a,b", *TWO, TWO[1]], {}, "row 4: 2014-06-02 01:00 is the same time as row 3; sort"),
        (
            ["time,a,b", *TWO, "2014-06-01 02:00,1,2"],
            {},
            "row 4: 2014-06-01 02:00 is before the .* 01:00 of row 3",
        ),
        (["time,a,b", *TWO, "2014-06-02 02:00,1,2", "2014-06-02 02:40,1,2"], {}, "row 5: .* is 40 minutes after"),
        (["time,a,b", TWO[0], "2014-06-02 00:07,1,2"], {}, "a value every 7 minutes; the step must divide a day"),
        (["time,a,b", *TWO, "2114-06-02 01:00,1,2"], {}, "row 4: 2114-06-02 01:00 is 36524 days after"),
        (["time,a,b", "2014-06-02T00:00Z,1,2", "2014-06-02 01:00,1,2"], {}, "row 3: .* has no offset from UTC, unlike"),
        (["time,a,b", "2014-06-02T00:00Z,1,2", "2014-06-02T02:00+01:00,1,2"], {}, "row 3: .* name its time zone"),
        (["time,a,b", *TWO], {}, "no client has training samples; each needs 4 values in a row"),
        (["time,a,b", *TWO], {"resample": 90}, "data.resample = 90 is not possible for .* every 60 minutes"),
    ],
)
def test_a_bad_table_is_one_clear_sentence(
    lines: list[str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (path := tmp_path / "table.csv").write_text("\n".join(lines))
    with pytest.raises(EquipoiseError, match=message):
        loads(path, **settings)


def test_a_bad_folder_or_setting_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match=r"data.path = 'nowhere' is not a file or folder in"):
        load("loads", tmp_path, path="nowhere")
    (tmp_path / "table.xlsx").write_bytes(b"PK")
    with pytest.raises(EquipoiseError, match=r"it must be a .csv or .parquet file"):
        loads(tmp_path / "table.xlsx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EquipoiseError, match="has no loads: put one"):
        loads(tmp_path / "empty")
    write(tmp_path / "sites" / "a.csv", plain(60), {"load": range(60), "other": range(60)})
    with pytest.raises(EquipoiseError, match="2 columns that may be the load: load, other; name it with"):
        loads(tmp_path / "sites")
    with pytest.raises(EquipoiseError, match=r"no column 'lod' \(data.target\) for the load; did you mean 'load'"):
        loads(tmp_path / "sites", target="lod")
    quarters = [f"{moment:%Y-%m-%d %H:%M}" for moment in moments(datetime(2014, 6, 2), 60, 15)]
    write(tmp_path / "sites" / "b.csv", quarters, {"load": range(60)})
    with pytest.raises(EquipoiseError, match=r"a.csv has a value every 60 .* b.csv every 15; set data.resample = 60"):
        loads(tmp_path / "sites", target="load")
    assert loads(tmp_path / "sites", target="load", resample=60).series.step == 60  # type: ignore[union-attr]
    for settings, message in (
        ({"timezone": "Europe/Lisbonn"}, "data.timezone = 'Europe/Lisbonn' is not a time zone; did you mean"),
        ({"resample": 45 + 5}, "data.resample = 50 does not divide a day"),
        ({"decimal": ","}, "data.decimal = ',' is also data.delimiter"),
    ):
        with pytest.raises(EquipoiseError, match=message):
            loads(tmp_path / "sites", **settings)
