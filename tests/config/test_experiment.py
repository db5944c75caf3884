"""The configuration: read strictly, written whole."""

import contextlib
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from equipoise.config.experiment import Experiment, override
from equipoise.data.partitions import PARTITIONS
from equipoise.data.sources import SOURCES
from equipoise.errors import EquipoiseError
from equipoise.runs.sweep import expand_sweep
from equipoise.storage.run_folder import RunFolder, read_toml


def tables(**changes: object) -> dict:
    base = {
        "rounds": 2,
        "data": {"name": "digits-by-writer", "clients": 5},
        "model": {"name": "softmax"},
        "algorithm": {"name": "ditto", "lam": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            base.setdefault(section, {})[name] = value
        else:
            base[section] = value
    return base


WRONG = [
    ({"model__head": 3}, "model.head = 3 is not allowed; it must be a string or a list, each a string or left out"),
    ({"model__head": ["head", 3]}, r"model.head = \['head', 3\] is not allowed"),
    ({"model__heads": "x"}, "unknown setting model.heads; did you mean 'head'"),
    ({"roundz": 3}, "unknown setting roundz; did you mean 'rounds'"),
    ({"engin": {}}, "unknown section engin; did you mean 'engine'"),
    ({"algorithm__lamb": 3}, "unknown setting algorithm.lamb; did you mean 'lam'"),
    ({"algorithm__name": "dito"}, "algorithm.name = 'dito' is unknown; did you mean 'ditto'"),
    ({"algorithm__lam": -1.0}, r"algorithm.lam = -1.0 is not allowed; it must be a number >= 0"),
    ({"algorithm__lam": "much"}, "algorithm.lam = 'much' is not allowed; it must be a number >= 0"),
    ({"algorithm__lam": float("nan")}, "algorithm.lam = nan is not allowed"),
    ({"algorithm__lr": 0}, "algorithm.lr = 0 is not allowed; it must be a number > 0"),
    ({"algorithm__epochs": 1.5}, "algorithm.epochs = 1.5 is not allowed; it must be a whole number >= 1"),
    ({"algorithm__batch": True}, "algorithm.batch = True is not allowed; it must be a whole number >= 1"),
    ({"algorithm__optimizer": "sdg"}, "algorithm.optimizer = 'sdg' is not allowed; it must be 'sgd', 'adam'"),
    ({"metrics": "accuracy"}, "metrics = 'accuracy' is not allowed; it must be a list, each a string"),
    ({"metrics": ["macro-f"]}, "unknown metric 'macro-f' .*did you mean 'macro-f1'"),
    ({"metrics": ["confusion-matrix"]}, "'confusion-matrix' is not one number, so it cannot be the first metric"),
    ({"metrics": ["nowhere.py:f"]}, "metrics names the file 'nowhere.py', which does not exist"),
    ({"rounds": 0}, "rounds = 0 is not allowed; it must be a whole number >= 1"),
    (
        {"participation": 1.5},
        "participation = 1.5 is not allowed; it must be a whole number >= 1 or a number > 0 and <= 1",
    ),
    ({"participation": 0}, "participation = 0 is not allowed"),
    ({"seed": "zero"}, "seed = 'zero' is not allowed; it must be a whole number >= 0"),
    ({"data__name": "fashion"}, "data.name = 'fashion' is unknown; did you mean 'fashion-mnist'"),
    ({"data__splits": [1, 0, 0]}, "unknown setting data.splits; did you mean 'split'"),
    ({"data__split": [0.5, 0.5]}, r"data.split = \[0.5, 0.5\] is not allowed; it must be a list of 3"),
    ({"data__split": [0.5, 0.1, 0.1]}, "data.split = .* must be three fractions"),
    ({"data__partition": "iid"}, "data.partition = 'iid' is not allowed; it must be a table"),
    (
        {"data__partition": {"kind": "dirichlt"}},
        "data.partition.kind = 'dirichlt' is unknown; did you mean 'dirichlet'",
    ),
    ({"data__partition": {"kind": "dirichlet", "alpha": 1.0}}, "unknown setting data.partition.alpha; available: beta"),
    (
        {"data__partition": {"kind": "hybrid", "first": {"kind": "labls"}}},
        "data.partition.first.kind = 'labls' is unknown; did you mean 'labels'",
    ),
    (
        {"data__partition": {"kind": "hybrid", "second": {"kind": "quantity", "beta": 0}}},
        "data.partition.second.beta = 0 is not allowed; it must be a number > 0",
    ),
    (
        {"data__partition": {"kind": "hybrid", "first": 3}},
        "data.partition.first = 3 is not allowed; it must be a table",
    ),
    (
        {"data__partition": {"kind": "hybrid", "first": {"kind": "hybrid"}}},
        "data.partition.first.kind = 'hybrid' is unknown",
    ),
    ({"data__unseen": 1.0}, "data.unseen = 1.0 is not allowed; it must be a number >= 0 and < 1"),
    ({"data__extend": "full"}, "unknown setting data.extend; did you mean 'extent'"),
    ({"data__extent": "all"}, "data.extent = 'all' is not allowed; it must be 'auto', 'full', 'excerpt'"),
    ({"data": {"name": "polynomial", "setting": 4}}, "data.setting = 4 is not allowed; it must be 1, 2, 3"),
    ({"data": {"clients": 3}}, "data.name is missing; available: digits-by-writer"),
    ({"data__partition": {}}, "data.partition.kind is missing; available: iid"),
    ({"model__name": "lenett"}, "model.name = 'lenett' is unknown; did you mean 'lenet'"),
    ({"model": {}}, "model.name is missing; available: linear, softmax"),
    ({"model": 3}, r"model = 3 is not allowed; it must be a section, \[model\]"),
    ({"engine": {"mode": "thread"}}, "engine.mode = 'thread' is not allowed; it must be 'auto', 'threads', 'stacked'"),
    ({"engine": {"workers": -1}}, "engine.workers = -1 is not allowed; it must be a whole number >= 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(c) for c, _ in WRONG])
def test_what_is_wrong_is_named_with_what_would_be_right(change: dict, message: str) -> None:
    with pytest.raises(EquipoiseError, match=message) as caught:
        Experiment.parse(tables(**change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", ["data", "model", "algorithm"])
def test_a_missing_section_is_named(section: str) -> None:
    whole = tables()
    del whole[section]
    with pytest.raises(EquipoiseError, match=rf"section \[{section}\] is missing"):
        Experiment.parse(whole)


@pytest.mark.parametrize("kind", PARTITIONS)
@pytest.mark.parametrize("name", SOURCES)
def test_every_data_set_and_partition_reads_back(name: str, kind: str) -> None:
    experiment = Experiment.parse(tables(data={"name": name, "partition": {"kind": kind}}))
    written = tomllib.loads(tomli_w.dumps(experiment.tables()))
    assert Experiment.parse(written) == experiment


def test_what_is_written_is_whole_and_reads_back(tmp_path: Path) -> None:
    experiment = Experiment.parse(tables())
    with RunFolder.at_work(tmp_path / "run", experiment.tables(), resume=False, data="/somewhere", mode="stacked"):
        pass
    text = (tmp_path / "run" / "run.toml").read_text()
    assert Experiment.parse(tomllib.loads(text)) == experiment
    for line in ("seed = 0", "evaluate_every = 1", "batch = 50", 'kind = "natural"', "workers = 0", "torch = "):
        assert line in text


def test_set_reads_values_as_toml_and_words_without_quotes() -> None:
    changed = override(tables(), ["algorithm.lam=0.5", "model.name=mlp", "data.split=[0.8, 0.1, 0.1]", "seed=3"])
    experiment = Experiment.parse(changed)
    assert (experiment.algorithm.lam, experiment.model_name, experiment.schedule.seed) == (0.5, "mlp", 3)
    assert experiment.data.dealing.split == (0.8, 0.1, 0.1)


@pytest.mark.parametrize("item", ["lam", "=3", "rounds.x=3"])
def test_a_malformed_set_is_said(item: str) -> None:
    with pytest.raises(EquipoiseError, match="--set"):
        override(tables(), [item])


@pytest.mark.slow
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    ),
    st.sampled_from(
        [
            "seed",
            "data__name",
            "data__split",
            "data__partition",
            "algorithm__lr",
            "algorithm__name",
            "engine",
            "participation",
            "model__name",
        ]
    ),
)
def test_no_value_brings_more_than_a_sentence(value: object, key: str) -> None:
    with contextlib.suppress(EquipoiseError):
        Experiment.parse(tables(**{key: value}))


def test_unreadable_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match="there is no file"):
        read_toml(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(EquipoiseError, match="not valid TOML"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(EquipoiseError, match="cannot be read"):
        read_toml(tmp_path / "bytes.toml")


def test_metrics_are_written_only_if_there_are_any() -> None:
    """Run folders of older versions, which do not name metrics, must be resumed and found."""
    assert "metrics" not in Experiment.parse(tables()).tables()
    assert "metrics" not in Experiment.parse(tables(metrics=[])).tables()
    several = ["accuracy", "auroc", "confusion-matrix"]
    assert Experiment.parse(tables(metrics=several)).tables()["metrics"] == several
    runs, _ = expand_sweep({**tables(metrics=several), "seed": [0, 1]})
    assert [run.experiment.schedule.metrics for run in runs] == [tuple(several)] * 2
