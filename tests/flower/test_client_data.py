"""A client's own data: every form in which they may come, and a sentence for everything else."""

import io
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

from equipoise.data.client_files import read_arrays
from equipoise.data.federation import Federation, from_clients
from equipoise.errors import EquipoiseError
from equipoise.flower import App
from equipoise.flower.client_data import DataFunction, client_data, write_client
from equipoise.flower.deployment_plan import DeploymentPlan
from tests.support.commands import is_one_sentence
from tests.support.messages import Burglar
from tests.support.problems import classification, small_mlp

SAMPLES = 20
X = np.random.default_rng(0).normal(size=(SAMPLES, 5))
Y = np.arange(SAMPLES) % 3
PARTS = {"train": (X[:12], Y[:12]), "validation": (X[12:14], Y[12:14]), "test": (X[14:], Y[14:])}
Arrays = dict[str, np.ndarray]


def flat(parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> Arrays:
    return {f"{split}.{k}": array for split, pair in parts.items() for k, array in zip("xy", pair, strict=True)}


def make_plan(folder: Path, *, own: bool = True, **tables: Any) -> DeploymentPlan:
    """The plan of an app in this folder, whose clients have five numbers and one of three labels a sample."""
    deploy = {"shape": [5], "outputs": 3, **tables.pop("deploy", {})}
    given = {"rounds": 1, "algorithm": {"name": "fedavg"}, **tables, "deploy": deploy}
    (folder / "experiment.toml").write_text(tomli_w.dumps(given))
    return App(folder / "app.py", model=small_mlp if own else None).plan


@pytest.fixture
def plan(tmp_path: Path) -> DeploymentPlan:
    return make_plan(tmp_path)


def save(path: Path, arrays: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, path)
    return path


def same(a: Federation, b: Federation) -> None:
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)
    assert (a.x.dtype, a.y.dtype, a.names, a.classes) == (b.x.dtype, b.y.dtype, b.names, b.classes)
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(a, split).flat, getattr(b, split).flat)
        np.testing.assert_array_equal(getattr(a, split).lengths, getattr(b, split).lengths)


def sizes(federation: Federation) -> tuple[int, ...]:
    return tuple(len(split[0]) for split in (federation.train, federation.validation, federation.test))


# What is taken


@pytest.mark.parametrize("name", ["all.safetensors", "all.npz"])
def test_one_file_with_all_parts(name: str, plan: DeploymentPlan, tmp_path: Path) -> None:
    path = save(tmp_path / name, flat(PARTS))
    found = client_data(plan, "ward", {"data": str(path)})
    same(found, from_clients([PARTS], names=["ward"]))
    assert sizes(found) == (12, 2, 6)


@pytest.mark.parametrize(
    "files",
    [
        {"train.npz": ("train",), "test.safetensors": ("test",), "validation.npz": ("validation",)},
        {"train.safetensors": ("train",), "test.npz": ("test",)},
        {"train.npz": ("train",)},
    ],
)
def test_a_folder_with_a_file_a_part(files: dict[str, tuple[str, ...]], plan: DeploymentPlan, tmp_path: Path) -> None:
    for file, (split,) in files.items():
        x, y = PARTS[split]
        save(tmp_path / "ward" / file, {"x": x, "y": y})
    (tmp_path / "ward" / "README.txt").write_text("what is no array is left alone")
    given = {split: PARTS[split] for split in PARTS if any(split in s for s in files.values())}
    same(client_data(plan, "ward", {"data": str(tmp_path / "ward")}), from_clients([given], names=["ward"]))


@pytest.mark.parametrize("files", [["data.npz"], ["data.safetensors"], ["x.npz", "y.safetensors"]])
def test_a_folder_with_arrays_that_have_their_full_names(
    files: list[str], plan: DeploymentPlan, tmp_path: Path
) -> None:
    arrays = flat(PARTS)
    for i, file in enumerate(files):
        part = {k: a for k, a in arrays.items() if len(files) == 1 or k.endswith("xy"[i])}
        save(tmp_path / "ward" / file, part)
    same(client_data(plan, "ward", {"data": str(tmp_path / "ward")}), from_clients([PARTS], names=["ward"]))


@pytest.mark.parametrize("name", ["ward/data.npz", "ward/data.safetensors", "ward/"])
def test_undivided_samples_are_split_by_name_and_seed(name: str, tmp_path: Path) -> None:
    save(tmp_path / (name if name != "ward/" else "ward/any.npz"), {"x": X, "y": Y})

    def found(client: str, seed: int) -> Federation:
        return client_data(make_plan(tmp_path, seed=seed), client, {"data": str(tmp_path / name)})

    same(found("ward", 0), from_clients([(X, Y)], names=["ward"]))
    same(found("ward", 7), from_clients([(X, Y)], names=["ward"], seed=7))
    assert sizes(found("ward", 0)) == (14, 2, 4)
    for client, seed in (("other", 0), ("ward", 7)):
        assert found(client, seed).train.flat.tolist() != found("ward", 0).train.flat.tolist()


def test_undivided_samples_are_split_as_the_experiment_says(tmp_path: Path) -> None:
    path = save(tmp_path / "data.npz", {"x": X, "y": Y})
    split = (0.5, 0.2, 0.3)
    plan = make_plan(tmp_path, data={"name": "digits-by-writer", "split": list(split)})
    found = client_data(plan, "ward", {"data": str(path)})
    same(found, from_clients([(X, Y)], names=["ward"], split=split))
    assert sizes(found) == (10, 4, 6)


def test_a_single_sample_is_for_training(plan: DeploymentPlan, tmp_path: Path) -> None:
    path = save(tmp_path / "data.npz", {"x": X[:1], "y": Y[:1]})
    assert sizes(client_data(plan, "ward", {"data": str(path)})) == (1, 0, 0)


def test_what_write_client_writes_is_read_back(plan: DeploymentPlan, tmp_path: Path) -> None:
    federation = classification(3)
    for who, name in enumerate(federation.names):
        write_client(tmp_path / f"{who}.safetensors", federation, who)
        found = client_data(plan, name, {"data": str(tmp_path / f"{who}.safetensors")})
        for split in ("train", "validation", "test"):
            theirs, ours = getattr(federation, split)[who], getattr(found, split)[0]
            assert len(ours) == len(theirs)
            for a, b in zip(
                found.gather(torch.from_numpy(ours)), federation.gather(torch.from_numpy(theirs)), strict=True
            ):
                assert torch.equal(a, b)
    assert "validation.x" not in read_arrays(tmp_path / "1.safetensors")  # this one has none


def torch_parts() -> dict[str, TensorDataset]:
    return {split: TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for split, (x, y) in PARTS.items()}


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "a pair of arrays": (lambda: (X, Y), (X, Y)),
    "a pair of tensors": (lambda: (torch.from_numpy(X), torch.from_numpy(Y)), (X, Y)),
    "a list of lists": (lambda: [X.tolist(), Y.tolist()], (X, Y)),
    "a dataset": (lambda: TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), (X, Y)),
    "a dictionary of pairs": (lambda: PARTS, PARTS),
    "a dictionary of datasets": (torch_parts, PARTS),
    "a dictionary with train only": (lambda: {"train": PARTS["train"]}, {"train": PARTS["train"]}),
}


@pytest.mark.parametrize("case", HOOKS)
def test_what_the_users_python_returns(case: str, plan: DeploymentPlan) -> None:
    make, meant = HOOKS[case]
    settings = {"name": "ward", "database": "postgres://here"}
    heard: list[Any] = []

    def hook(given: Any) -> Any:
        heard.append(given)
        return make()

    same(client_data(plan, "ward", settings, hook), from_clients([meant], names=["ward"]))
    assert heard == [settings]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint16])
def test_labels_of_any_kind_of_whole_number(dtype: type, plan: DeploymentPlan, tmp_path: Path) -> None:
    path = save(tmp_path / "data.npz", {"x": X.astype(np.float16), "y": Y.astype(dtype)})
    found = client_data(plan, "ward", {"data": str(path)})
    assert found.y.dtype is torch.int64
    assert found.y.tolist() == Y.tolist()


def test_the_experiment_knows_how_many_labels_there_are(plan: DeploymentPlan, tmp_path: Path) -> None:
    path = save(tmp_path / "data.npz", {"x": X, "y": np.zeros_like(Y)})
    assert client_data(plan, "ward", {"data": str(path)}).classes == 3


def test_targets_that_are_numbers(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, deploy={"targets": "numbers", "target_shape": [2], "outputs": 2})
    path = save(tmp_path / "data.npz", {"x": X, "y": X[:, :2]})
    found = client_data(plan, "ward", {"data": str(path)})
    assert found.classes is None
    assert found.y.shape == (SAMPLES, 2)


def test_inputs_that_are_symbols(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, deploy={"inputs": "symbols", "target_shape": [5]})
    symbols = np.tile(np.arange(5), (SAMPLES, 1))
    path = save(tmp_path / "data.npz", {"x": symbols, "y": symbols % 3})
    found = client_data(plan, "ward", {"data": str(path)})
    assert found.x.tolist() == symbols.tolist()
    assert found.y.shape == (SAMPLES, 5)


def test_a_path_below_the_users_home(plan: DeploymentPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "mine" / "data.npz", {"x": X, "y": Y})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(client_data(plan, "ward", {"data": "~/mine"}).x) == SAMPLES


# What is not


def said(plan: DeploymentPlan, data: Any, *words: str, hook: DataFunction | None = None) -> None:
    """One sentence, with these words in it."""
    with pytest.raises(EquipoiseError) as caught:
        client_data(plan, "ward", {"data": str(data)}, hook)
    is_one_sentence(caught.value, *words)


def with_nan(where: tuple[int, int], value: float) -> np.ndarray:
    x = X.copy()
    x[where] = value
    return x


NEEDED = "the arrays must be x and y, or train.x and train.y"
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "only x": ({"x": X}, ("has only one of x and y",)),
    "only y": ({"y": Y}, ("has only one of x and y",)),
    "only the inputs of a part": (
        {**flat(PARTS), "test.y": None},
        ("has only one of test.x and test.y; both are needed",),
    ),
    "stray arrays": ({"x": X, "y": Y, "weights": Y, "ids": Y}, ("has ids, weights;", NEEDED)),
    "a part of another name": ({**flat(PARTS), "holdout.x": X, "holdout.y": Y}, ("holdout.x, holdout.y", NEEDED)),
    "divided and undivided": ({"x": X, "y": Y, **flat(PARTS)}, ("both undivided samples and divided ones", NEEDED)),
    "no training samples": ({"test.x": X, "test.y": Y}, ("has no training samples", NEEDED)),
    "a part for training without samples": (
        {"train.x": X[:0], "train.y": Y[:0], "test.x": X, "test.y": Y},
        ("'ward' has no training samples",),
    ),
    "as many inputs as no targets": ({"x": X, "y": Y[:-1]}, ("'ward' has 20 inputs and 19 targets",)),
    "another shape": ({"x": X[:, :4], "y": Y}, ("samples have the shape [4]", "deploy.shape = [5]")),
    "one axis more": ({"x": X[:, None], "y": Y}, ("samples have the shape [1, 5]", "deploy.shape = [5]")),
    "shapes that differ": ({**flat(PARTS), "test.x": X[14:, :4]}, ("different shapes: (4,), (5,)",)),
    "targets of another shape": ({"x": X, "y": Y[:, None]}, ("targets have the shape [1]", "deploy.target_shape = []")),
    "NaN": ({"x": with_nan((3, 2), np.nan), "y": Y}, ("there is NaN or infinity in the inputs",)),
    "NaN in a part": ({**flat(PARTS), "test.x": with_nan((19, 0), np.nan)[14:]}, ("NaN or infinity in the inputs",)),
    "infinity": ({"x": with_nan((0, 0), -np.inf), "y": Y}, ("there is NaN or infinity in the inputs",)),
    "a label too high": ({"x": X, "y": Y + 1}, ("labels go from 1 to 3", "deploy.outputs = 3", "0 to 2")),
    "a negative label": ({"x": X, "y": Y - 1}, ("labels go from -1 to 1", "0 to 2")),
    "a label too high in a part": ({**flat(PARTS), "test.y": Y[14:] + 9}, ("labels go from 0 to 11",)),
    "floats for labels": (
        {"x": X, "y": Y.astype(float)},
        ("targets are fractional numbers", "they are whole numbers", "deploy.targets"),
    ),
    "floats for labels in a part": ({**flat(PARTS), "test.y": Y[14:] / 2}, ("targets are fractional numbers",)),
    "whole numbers for inputs": (
        {"x": X.astype(np.int64), "y": Y},
        ("inputs are whole numbers", "they are fractional numbers", "deploy.inputs"),
    ),
}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_bring_a_sentence(case: str, suffix: str, plan: DeploymentPlan, tmp_path: Path) -> None:
    arrays, words = BAD[case]
    path = save(tmp_path / f"data{suffix}", {name: a for name, a in arrays.items() if a is not None})
    names = "'ward'" in words[0] or "different" in words[0]
    said(plan, path, *([] if names else [str(path)]), *words)


def test_targets_that_are_not_finite_bring_a_sentence(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, deploy={"targets": "numbers", "outputs": 1})
    path = save(tmp_path / "data.npz", {"x": X, "y": with_nan((0, 0), np.inf)[:, 0]})
    said(plan, path, str(path), "NaN or infinity in the targets")
    path = save(tmp_path / "data.npz", {"x": X, "y": Y})
    said(plan, path, "targets are whole numbers", "they are fractional numbers")


def test_a_place_without_data_brings_a_sentence(plan: DeploymentPlan, tmp_path: Path) -> None:
    for name in ("nothing.npz", "nothing.safetensors"):
        said(plan, tmp_path / name, f"there is no file {tmp_path / name}")
    kinds = ".safetensors, .npz, .csv or .parquet file"
    said(plan, tmp_path / "nothing", f"{tmp_path / 'nothing'} is not a folder, nor a {kinds}")
    (tmp_path / "data.xls").write_text("1,2\n")
    said(plan, tmp_path / "data.xls", f"data.xls is not a folder, nor a {kinds}")
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    said(plan, tmp_path / "data.csv", "data.target is missing", "it has a, b")
    (tmp_path / "empty").mkdir()
    said(plan, tmp_path / "empty", f"{tmp_path / 'empty'} has no data: put a {kinds} there", "train.x")
    (tmp_path / "empty" / "data.xls").write_text("1,2\n")
    said(plan, tmp_path / "empty", "has no data")


@pytest.mark.parametrize("settings", [{}, {"data": ""}, {"data": 3}, {"dta": "here"}])
def test_settings_that_do_not_say_where_bring_a_sentence(settings: dict[str, Any], plan: DeploymentPlan) -> None:
    with pytest.raises(EquipoiseError, match="do not say where its data are: set data = '/path/to/folder'"):
        client_data(plan, "ward", settings)


def test_a_folder_with_the_same_array_twice_brings_a_sentence(plan: DeploymentPlan, tmp_path: Path) -> None:
    folder = tmp_path / "ward"
    save(folder / "train.npz", {"x": X, "y": Y})
    save(folder / "train.safetensors", {"x": X, "y": Y})
    said(plan, folder, f"{folder} has train.", "twice; keep one of its files")
    (folder / "train.safetensors").unlink()
    save(folder / "more.npz", {"train.y": Y})
    said(plan, folder, f"{folder} has train.y twice")
    (folder / "more.npz").unlink()
    save(folder / "test.npz", {"test.x": X, "test.y": Y})
    said(plan, folder, f"{folder} has test.test.x, test.test.y;", NEEDED)


def test_pickled_objects_are_not_opened(plan: DeploymentPlan, tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "data.npz"
    np.savez(path, x=X, y=np.array([Burglar(trace)] * SAMPLES, dtype=object))
    with np.load(path, allow_pickle=True) as arrays:
        assert len(arrays["y"]) == SAMPLES
    assert trace.exists(), "it is a working burglar"
    trace.unlink()
    said(plan, path, str(path), "cannot be read as arrays", "Object arrays cannot be loaded")
    path.write_bytes(pickle.dumps(Burglar(trace)))
    said(plan, path, str(path), "cannot be read as arrays", "pickled")
    assert not trace.exists()


@pytest.mark.parametrize("array", [np.array(["cat"] * SAMPLES), np.full(SAMPLES, "2020-01-01", "M8[D]")])
def test_arrays_that_are_no_numbers_bring_a_sentence(array: np.ndarray, plan: DeploymentPlan, tmp_path: Path) -> None:
    path = save(tmp_path / "data.npz", {"x": X, "y": array})
    said(plan, path, str(path), "cannot be read as arrays")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_that_was_cut_or_is_of_another_kind_brings_a_sentence(
    suffix: str, plan: DeploymentPlan, tmp_path: Path
) -> None:
    path = save(tmp_path / f"data{suffix}", {"x": X, "y": Y})
    whole = path.read_bytes()
    for length in range(1, len(whole), 37):
        path.write_bytes(whole[:length])
        said(plan, path, str(path), "cannot be read as arrays")
    other = save(tmp_path / ("data.safetensors" if suffix == ".npz" else "data.npz"), {"x": X, "y": Y})
    other.rename(path)
    said(plan, path, str(path), "cannot be read as arrays")
    single = io.BytesIO()
    np.save(single, X)
    path.write_bytes(single.getvalue())
    said(plan, path, str(path), "cannot be read as arrays")


@pytest.mark.slow
def test_flipped_bits_bring_a_sentence_or_sound_data(plan: DeploymentPlan, tmp_path: Path) -> None:
    path = save(tmp_path / "data.safetensors", {"x": X[:2], "y": Y[:2]})
    whole = path.read_bytes()
    told = 0
    for bit in range(0, 8 * len(whole), 3):
        blob = bytearray(whole)
        blob[bit // 8] ^= 1 << bit % 8
        path.write_bytes(blob)
        try:
            found = client_data(plan, "ward", {"data": str(path)})
        except EquipoiseError as error:
            told += "\n" not in str(error)
        else:
            told += found.x.shape == (2, 5) and bool(found.x.isfinite().all()) and set(found.y.tolist()) <= {0, 1, 2}
    assert told == len(range(0, 8 * len(whole), 3))


def test_an_empty_or_damaged_npz_brings_a_sentence(plan: DeploymentPlan, tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    path.write_bytes(b"")
    said(plan, path, "cannot be read as arrays")
    np.savez_compressed(path, x=X, y=Y)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with suppress(EquipoiseError):  # some bits are nobody's; whatever else is raised is not suppressed
            client_data(plan, "ward", {"data": str(path)})


def test_a_file_that_may_not_be_read_brings_a_sentence(
    plan: DeploymentPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile, "is_zipfile", denied)
    path = save(tmp_path / "data.npz", {"x": X, "y": Y})
    said(plan, path, str(path), "cannot be read as arrays", "Permission denied")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trn": (X, Y)}, "has the parts ['trn']; it needs 'train'"),
        ({"train": (X, Y), "holdout": (X, Y)}, "has the parts ['holdout', 'train']"),
        ({"test": (X, Y)}, "it needs 'train'"),
        ({"x": X, "y": Y}, "it needs 'train'"),
        ((X, Y[:3]), "has 20 inputs and 3 targets"),
        ((X[:, :3], Y), "the data of ward: samples have the shape [3], but the experiment says deploy.shape = [5]"),
        ((X, Y + 1), "the data of ward: labels go from 1 to 3"),
        ((X * np.inf, Y), "the data of ward: there is NaN or infinity in the inputs"),
        (TensorDataset(torch.zeros(0, 5), torch.zeros(0)), "'ward' has no samples"),
        ((X[:0], Y[:0]), "'ward' has no training samples"),
        (None, "data() of app.py returned NoneType; it must return (x, y)"),
        ("arrays.npz", "data() of app.py returned str"),
        ({"train": None}, "must be a pair of arrays (x, y)"),
        ((X,), "must be a pair of arrays (x, y)"),
        ((X, Y, Y), "must be a pair of arrays (x, y)"),
        ({"train": (X, Y), "test": (X, Y[:, None])}, "targets have different shapes"),
        ({"train": (X, Y), "test": (X[:0, :3], Y[:0])}, "samples have different shapes"),
    ],
)
def test_what_the_users_python_may_not_return_brings_a_sentence(given: Any, words: str, plan: DeploymentPlan) -> None:
    said(plan, "", words, hook=lambda settings: given)


def test_a_plan_without_a_shape_brings_a_sentence(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, deploy={"shape": []})
    path = save(tmp_path / "data.npz", {"x": X, "y": Y})
    said(plan, path, "give deploy.shape, such as [1, 28, 28], and deploy.outputs")
