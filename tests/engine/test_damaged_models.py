"""Model files that are damaged, or made to do harm: one sentence each, before any memory is taken."""

import json
import os
import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.engine.model_files import write_tensors_of_model
from equipoise.models import MODELS
from equipoise.models.base import ModelSettings
from tests.support.fuzzing import run_case, source_of
from tests.support.problems import classification, small_mlp
from tests.support.waiting import LIMIT


@pytest.fixture
def blob(tmp_path: Path) -> bytes:
    module = MODELS["mlp"](hidden=(5,)).build((4,), 3)
    described = {"shape": [4], "outputs": 3, "dtype": "float32", "model": {"name": "mlp", "hidden": [5]}}
    write_tensors_of_model(tmp_path / "whole", {k: t.clone() for k, t in module.state_dict().items()}, described)
    eq.load_model(tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


def parts(blob: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def joined(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def described(blob: bytes, **changes: Any) -> bytes:
    header, data = parts(blob)
    facts = json.loads(header["__metadata__"]["equipoise"])
    for key, value in changes.items():
        facts.pop(key) if value is None else facts.update({key: value})
    header["__metadata__"]["equipoise"] = json.dumps(facts)
    return joined(header, data)


def entry(blob: bytes, **changes: Any) -> bytes:
    header, data = parts(blob)
    header["head.weight"] |= changes
    return joined(header, data)


def refused(path: Path, blob: bytes, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence, after which no tensor has been made; neither by the file nor by the model."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("tensors were read")

    path.write_bytes(blob)
    build = MODELS["mlp"].build

    def only_on_meta(self: ModelSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
        assert torch.empty(0).is_meta
        return build(self, shape, outputs)

    monkeypatch.setattr("equipoise.engine.model_files.safe_open", never)
    monkeypatch.setattr(MODELS["mlp"], "build", only_on_meta)
    with pytest.raises(eq.EquipoiseError) as caught:
        eq.load_model(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


TERABYTES = [10**6, 10**6]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: described(b, model={"name": "mlp", "hidden": [10**12]}), "model.hidden = [1000000000000] is not"),
        (lambda b: described(b, model={"name": "mlp", "hidden": [10**9]}), "has the shape [1000000000, 4], and [5, 4]"),
        (
            lambda b: described(b, model={"name": "mlp", "hidden": [10**9] * 9}),
            "has the shape [1000000000, 4], and [5, 4]",
        ),
        (lambda b: described(b, model={"name": "mpl"}), "model.name = 'mpl' is unknown; did you mean 'mlp'?"),
        (lambda b: described(b, model="mlp"), "its description names no model, shape and number of outputs"),
        (lambda b: described(b, model={"name": ["mlp"]}), "is unknown"),
        (lambda b: described(b, model={}), "model.name is missing"),
        (lambda b: described(b, shape=[-4]), "its description names no model, shape and number of outputs"),
        (lambda b: described(b, shape=None), "its description names no model, shape and number of outputs"),
        (lambda b: described(b, shape=[10**9] * 3), "describes a model that cannot be built"),
        (lambda b: described(b, outputs=10**100), "its description names no model, shape and number of outputs"),
        (lambda b: described(b, outputs=True), "its description names no model, shape and number of outputs"),
        (lambda b: entry(b, shape=TERABYTES), "'head.weight' of shape [1000000, 1000000] does not fit into the file"),
        (lambda b: entry(b, shape=TERABYTES, data_offsets=[0, 4 * 10**12]), "does not fit into the file"),
        (lambda b: entry(b, shape=[-3, 5]), "'head.weight' has no valid shape or place"),
        (lambda b: entry(b, shape=[3.0, 5.0]), "'head.weight' has no valid shape or place"),
        (lambda b: entry(b, shape="35"), "'head.weight' has no valid shape or place"),
        (lambda b: entry(b, shape=[1] * 100), "'head.weight' has no valid shape or place"),
        (lambda b: entry(b, dtype="C64"), "'head.weight' has the number format 'C64', which is not supported"),
        (lambda b: entry(b, dtype=["F32"]), "which is not supported"),
        (lambda b: entry(b, dtype="I32"), "'head.weight' has numbers of type float32, and int32 in the file"),
        (lambda b: joined(b"[" * 100_000, b""), "its header is nested too deeply"),
        (lambda b: joined(b"[" * 2_000_000, b""), "its header has 2000000 bytes"),
        (lambda b: joined(b'{"\xff": 1}', b""), "cannot be read as a model: 'utf-8' codec can't decode"),
        (lambda b: joined([], b""), "its header is not a JSON object"),
        (lambda b: joined({"__metadata__": {"format": 3}}, b""), "its metadata are not texts"),
        (lambda b: joined({"__metadata__": {}, "a": 3}, b""), "'a' is not described"),
        (lambda b: joined(b'{"a": ' + b"9" * 5000 + b"}", b""), "cannot be read as a model"),
        (lambda b: struct.pack("<Q", 2**63) + b[8:], "it is not a safetensors file, or it is cut off"),
        (lambda b: b[:7], "it is not a safetensors file, or it is cut off"),
        (lambda b: b[:-1], "does not fit into the file"),
    ],
)
def test_a_file_is_compared_with_the_model_before_memory_is_taken(
    change: Any, words: str, blob: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words in refused(tmp_path / "model", change(blob), monkeypatch)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "[" * 50_000, "9" * 5000, "{" + " " * 100_000 + "}"])
def test_a_description_that_is_none_is_refused(
    text: str, blob: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, data = parts(blob)
    header["__metadata__"]["equipoise"] = text
    assert "it has no description; export the model again" in refused(
        tmp_path / "model", joined(header, data), monkeypatch
    )


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(eq.EquipoiseError, match="cannot be read as a model: it is not a file"):
            eq.load_model(path)


def test_ones_own_module_is_compared_before_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(3, 3)
    write_tensors_of_model(tmp_path / "model", {"weight": torch.ones(3, 3), "bias": torch.ones(3).long()}, {})

    def no_copy(_: object) -> None:
        raise AssertionError("the module is copied before it is compared")

    monkeypatch.setattr("equipoise.engine.model_files.copy", SimpleNamespace(deepcopy=no_copy))
    with pytest.raises(eq.EquipoiseError, match="its 'bias' has numbers of type float32, and int64 in the file"):
        eq.load_model(tmp_path / "model", module)


@pytest.mark.parametrize("cases", [range(100), pytest.param(range(100, 500), marks=pytest.mark.slow)], ids=str)
def test_damaged_models_bring_as_many_sentences_or_models(cases: range, tmp_path: Path) -> None:
    """As many more as one likes: `benchmarks/fuzz.py`."""
    folder = tmp_path / "case"
    folder.mkdir()
    worked = [run_case("models", source_of(0, "models", number), folder, LIMIT) for number in cases]
    assert 0 < sum(worked) < len(cases) / 2


@pytest.mark.filterwarnings("ignore::equipoise.RunWarning")
def test_facts_about_a_run_that_do_not_fit_its_models_are_refused(tmp_path: Path) -> None:
    eq.train(small_mlp(), classification(3), "ditto", rounds=1).save(tmp_path / "run")
    path = tmp_path / "run" / "models.safetensors"
    whole = path.read_bytes()

    def said(**changes: Any) -> str:
        path.write_bytes(described(whole, **changes))
        with pytest.raises(eq.EquipoiseError) as caught:
            eq.load_result(tmp_path / "run", small_mlp())
        return str(caught.value)

    assert "'choices' has the shape [3], not [2]" in said(clients=["a", "b"])
    assert "models.clients is missing" in said(clients=None)
    assert "models.dtype = 'system' is not allowed" in said(dtype="system")
    assert "models.inputs = " in said(inputs=[[10**12], "float32"])
    assert "models.rounds = 'x' is not allowed" in said(rounds="x")
    assert "it has no tensor 'module.x'" in said(buffers=["x"])
    assert "'global' has the shape [75], not [3]" in said(parameters=[["w", [3]]])
    path.write_bytes(whole)
    (tmp_path / "run" / "run.toml").write_text("a = 1")
    with pytest.raises(eq.EquipoiseError, match=r"has no section \[model\]; it is not the one that the run wrote"):
        eq.load_result(tmp_path / "run", small_mlp())


def test_every_library_model_is_the_same_on_the_meta_device() -> None:
    """What `load_model` compares a file with is what it builds."""
    shapes = {"lstm": (10,), "transformer": (20,), "transformer-8": (20,), "deq-transformer": (20,)}
    for name, settings in MODELS.items():
        shape = shapes.get(name, (3, 32, 32))
        with torch.device("meta"):
            planned = settings().build(shape, 10).state_dict()
        built = settings().build(shape, 10).state_dict()
        assert {k: (t.shape, t.dtype) for k, t in planned.items()} == {k: (t.shape, t.dtype) for k, t in built.items()}
        assert all(t.is_meta for t in planned.values())


def test_cases_are_given_by_their_numbers() -> None:
    assert source_of(1, "models", 2).random() == source_of(1, "models", 2).random() != random.Random(1).random()
