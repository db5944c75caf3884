"""Targets of fuzzing: each makes one random case, and fails unless it works or is refused with one short sentence.

The tests try a few cases of each target, and `benchmarks/fuzz.py` as many as there is time for. A case is given by a
source of random numbers and an empty folder for its files, which is kept if it fails.
"""

import json
import os
import random
import shutil
import signal
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import tomli_w
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from safetensors import safe_open
from safetensors.torch import save_file

import equipoise as eq
from equipoise.algorithms import ALGORITHMS
from equipoise.attacks import ATTACKS
from equipoise.config.experiment import Experiment
from equipoise.data.cache import _digest
from equipoise.data.federation import from_shares
from equipoise.data.partitions.iid import IID
from equipoise.data.partitions.natural import Natural
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest
from equipoise.data.sources import SOURCES
from equipoise.engine.assembly import check_model_size
from equipoise.engine.model_files import write_tensors_of_model
from equipoise.errors import EquipoiseError
from equipoise.flower.codec import RejectedMessage, pack
from equipoise.flower.protocol import Answer, Order, open_message
from equipoise.models import MODELS
from equipoise.randomness import generator
from equipoise.reducers import REDUCERS
from equipoise.runs.sweep import expand_sweep
from equipoise.settings import Settings
from equipoise.storage.run_folder import read_toml
from tests.support import datafiles
from tests.support.checkpoint_mutations import mutate
from tests.support.flower_memory import SUPERLINK, speaking_as
from tests.support.messages import ALLOWED, NUMBERS, RUN, tensors_of
from tests.support.mutations import mutate_bytes, mutate_tree
from tests.support.problems import classification, small_mlp

LONGEST = 2000
"""The largest number of characters of a sentence."""
TOML_SNIPPETS = [
    *(b"[" * 3000, b"{a=" * 500, b"[[a]]\n", b"[x]\n", b"a.b.c = 1\n", b'"\\n" = 1\n', b"= ", b"'''", b'"""', b"\xff"),
    *(
        b"9" * 5000,
        b"1e400",
        b"-inf",
        b"nan",
        b"0x",
        b"1979-13-45",
        b"07:32:00",
        b"\x00",
        b"\xef\xbb\xbf",
        b"a = 1\n" * 3,
    ),
]
JSON_SNIPPETS = [b"[" * 3000, b'{"a":' * 2000, b"1e999", b"-1", b"null", b"NaN", b"9" * 5000, b'"', b"\\u0000", b"{}"]


class HangError(BaseException):
    """A case took too long; not an Exception, because nothing may catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise HangError in a block that takes longer; in the main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError(f"still at it after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def works(action: Callable[[], object]) -> bool:
    """Tell whether an action works (True) or is refused with a sentence (False); every other error is passed on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except (EquipoiseError, RejectedMessage) as error:
        text = str(error)
    else:
        return True
    if not text or len(text.splitlines()) != 1 or len(text) >= LONGEST:
        raise AssertionError(f"not one short sentence: {text[:3000]!r}")
    return False


@cache
def prepared() -> Path:
    """A folder of this process for files that cases begin with."""
    folder = Path(tempfile.mkdtemp(prefix="equipoise-fuzz-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    import atexit

    atexit.register(remove)
    return folder


# TOML


def _section(rng: random.Random, registry: Any) -> dict[str, Any]:
    name = rng.choice(sorted(registry))
    try:
        return {"name": name, **registry[name]().table()}
    except EquipoiseError:  # it has settings without defaults
        return {"name": name}


def _tables(rng: random.Random) -> dict[str, Any]:
    """A valid experiment, or nearly so: parts need not fit together."""
    tables: dict[str, Any] = {
        **{"rounds": 3, "seed": 1, "participation": 0.5, "metrics": ["accuracy"], "targets": [0.5]},
        "data": {**_section(rng, SOURCES), "clients": 4, "partition": {"kind": "iid"}},
        "model": _section(rng, MODELS),
        "algorithm": {**_section(rng, ALGORITHMS), "schedule": {"kind": "step", "every": 2}},
        "engine": {"mode": "threads", "workers": 1},
    }
    optional: dict[str, Any] = {
        "attack": _section(rng, ATTACKS),
        "reducer": _section(rng, REDUCERS),
        "privacy": {"clip": 1.0, "sigma": 0.1, "where": "local"},
        "devices": {"iterations": [5, 10], "fractions": [0.5, 0.5]},
        "deploy": {"clients": 3, "deadline": 10.0},
        "callbacks": [{"name": "progress"}, {"name": "early-stopping", "patience": 3}],
        "written": {"folders": ["."]},
    }
    return tables | {key: optional[key] for key in optional if rng.random() < 0.3}


def _experiment(path: Path) -> None:
    experiment = Experiment.load(path)
    again = path.with_name("again.toml")
    again.write_text(tomli_w.dumps(experiment.tables()), encoding="utf-8")
    assert Experiment.load(again).tables() == experiment.tables()
    if experiment.model is not None:
        for shape in ((3, 32, 32), (80,)):
            try:
                check_model_size(experiment.model, shape, 10)
            except EquipoiseError as error:
                works(lambda error=error: _raise(error))


def _raise(error: Exception) -> None:
    raise error


def _dumped(tables: dict[str, Any]) -> str | None:
    try:
        return tomli_w.dumps(tables)
    except (ValueError, TypeError, RecursionError):  # what TOML cannot say
        return None


def toml_tables(rng: random.Random, folder: Path) -> bool:
    tables = _tables(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        mutate_tree(rng, tables, moment=True)
    if (text := _dumped(tables)) is None:
        return False
    (folder / "experiment.toml").write_text(text, encoding="utf-8", errors="surrogatepass")
    return works(lambda: _experiment(folder / "experiment.toml"))


def toml_text(rng: random.Random, folder: Path) -> bool:
    text = tomli_w.dumps(_tables(rng)).encode()
    (folder / "experiment.toml").write_bytes(mutate_bytes(rng, text, TOML_SNIPPETS))
    return works(lambda: _experiment(folder / "experiment.toml"))


def toml_sweeps(rng: random.Random, folder: Path) -> bool:
    tables = _tables(rng)
    tables["algorithm"]["lr"] = [0.1, 0.2]
    tables |= {"sweep": {"tune": ["algorithm.lr"], "by": "personal"}, "scale": {"smoke": {"rounds": 1}}}
    tables |= {"variant": [{"rounds": 2}, {"data": {"clients": 5}}]} if rng.random() < 0.3 else {}
    for _ in range(rng.choice([0, 1, 1, 2])):
        mutate_tree(rng, tables, moment=True)
    if (text := _dumped(tables)) is None:
        return False
    (folder / "sweep.toml").write_text(text, encoding="utf-8", errors="surrogatepass")
    return works(lambda: expand_sweep(read_toml(folder / "sweep.toml"), folders=[folder]))


# Data


def _own_files(folder: Path) -> dict[str, list[Path]]:
    """Files of the user's own clients in every format."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), np.arange(30) % 3
    found = {}
    for kind in ("npz", "safetensors", "csv", "parquet"):
        place = folder / kind
        place.mkdir(parents=True)
        for name in ("a", "b"):
            if kind == "npz":
                np.savez_compressed(place / f"{name}.npz", x=x, y=y)
            elif kind == "safetensors":
                save_file({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, place / f"{name}.safetensors")
            elif kind == "csv":
                rows = [",".join(f"{v:.4f}" for v in row) + f",{label}" for row, label in zip(x, y, strict=True)]
                (place / f"{name}.csv").write_text("\n".join(["p,q,r,s,target", *rows]) + "\n")
            elif find_spec("pyarrow") is not None:
                import pyarrow
                from pyarrow import parquet

                columns = {f"x{k}": x[:, k] for k in range(4)} | {"target": y}
                parquet.write_table(pyarrow.table(columns), place / f"{name}.parquet")
        found[f"folder of {kind}"] = sorted(place.iterdir())
    return {name: paths for name, paths in found.items() if paths}


LAYOUTS: dict[str, Callable[[Path], dict[str, list[Path]]]] = {
    "everything": datafiles.everything,
    "other_layouts": datafiles.other_layouts,
    "own": _own_files,
}


@cache
def data_files(layout: str) -> tuple[Path, dict[str, list[Path]]]:
    """A folder with small files of a layout, and the files of each data set."""
    folder = prepared() / layout
    folder.mkdir()
    return folder, LAYOUTS[layout](folder)


def data_case(layout: str, name: str) -> Callable[[random.Random, Path], bool]:
    """Return the target of one data set."""

    def case(rng: random.Random, folder: Path) -> bool:
        whole, files = data_files(layout)
        work, store = folder / "data", folder / "cache"
        victim = rng.choice(files[name])
        for file in files[name]:
            copy = work / file.relative_to(whole)
            copy.parent.mkdir(parents=True, exist_ok=True)
            content = file.read_bytes()
            copy.write_bytes(mutate_bytes(rng, content, JSON_SNIPPETS) if file == victim else content)
        with mock.patch.dict(os.environ, EQUIPOISE_CACHE=str(store)):
            if layout == "own":
                work = (work / victim.relative_to(whole)).parent
            return look_and_load(name.split()[0], work, store)

    return case


def look_and_load(name: str, work: Path, store: Path) -> bool:
    """Load a data set twice; what is loaded is sound, and nothing is cached that did not decode as a whole."""
    settings: dict[str, Any] = {"extent": "full"} if name == "digits-by-writer" else {}
    source = SOURCES[name](**({"target": "target"} if name == "folder" else settings))
    works(lambda: source.look(work))
    pools: list[Pool] = []
    if works(lambda: pools.append(source.load(LoadRequest(work)))):
        if not is_sound(pools[0], source.own):
            return False
        again = source.load(LoadRequest(work))  # from the cache
        assert torch.equal(again.x, pools[0].x)
        assert torch.equal(again.y, pools[0].y)
        return True
    # A file that decodes may still be useless (no window fits).
    for entry in store.glob("*"):
        with safe_open(entry, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            assert file.metadata()["digest"] == _digest(arrays)
    return False


def is_sound(pool: Pool, own: bool) -> bool:
    """Tell whether samples can be trained on; others are refused before a run begins."""

    def divide() -> None:
        partition, clients = (Natural(), None) if pool.owner is not None else (IID(), 1)
        shares = partition(pool, clients, generator(0, "partition"))
        from_shares(pool.x, pool.y, shares, (0.7, 0.1, 0.2), 0, pool.classes, pool.part).fingerprint(splits=True)

    if not works(divide):
        return False
    assert len(pool.x) == len(pool.y) > 0
    assert not pool.x.is_floating_point() or bool(torch.isfinite(pool.x).all())
    if pool.classes is not None:
        if own and int(pool.y.min()) < 0:  # the task refuses it
            return False
        assert int(pool.y.min()) >= 0
        assert int(pool.y.max()) < pool.classes
    return True


# Messages

FACTS: list[Settings] = [
    Order(run=RUN),
    Order(run=RUN, exchange=7, client="ward", clients=9, accepted=3, train=4, evaluate=3, finish=True, shared="down.w"),
    Answer(run=RUN, number=3, client="ward", size=100, trained=4, samples=400),
]


def messages(rng: random.Random, folder: Path) -> bool:
    facts = rng.choice(FACTS)
    table = facts.table()
    if rng.random() < 0.5:
        mutate_tree(rng, table)
    blob = pack(tensors_of(bytes(rng.randrange(256) for _ in range(NUMBERS))), table)
    how = rng.random()
    if how < 0.4:
        blob = mutate_bytes(rng, blob, JSON_SNIPPETS)
    elif how < 0.8:
        blob = _with_header(rng, blob)
    (folder / "message").write_bytes(blob)
    record = RecordDict({"equipoise": ConfigRecord({"message": blob})})
    with speaking_as(SUPERLINK):
        message = Message(record, 2, "query")

    def opened() -> None:
        found, tensors = open_message(message, type(facts), ALLOWED)
        assert type(found) is type(facts)
        assert all(shape == ALLOWED[name] for name, shape in tensors.shapes().items())

    return works(opened)


def _with_header(rng: random.Random, blob: bytes) -> bytes:
    """Change the header of safetensors bytes, or the JSON in its metadata."""
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    if rng.random() < 0.5 and "equipoise" in metadata:
        facts = json.loads(metadata["equipoise"])
        for _ in range(rng.choice([1, 1, 3])):
            mutate_tree(rng, facts, [None, [784], [10**12], [-1], "resnet-18", "lstm", "transformer"])
        metadata["equipoise"] = json.dumps(facts)
        if rng.random() < 0.1:
            metadata["equipoise"] = rng.choice(["[" * 5000, "null", "{", "[]", '{"a":' * 3000, "9" * 5000])
    else:
        for _ in range(rng.choice([1, 1, 3])):
            mutate_tree(
                rng, header, [None, "F64", "F16", "BF16", "C64", "F8_E4M3", "I64", [2**40], [0], [1, 1], [0, 2**50]]
            )
    try:
        text = json.dumps(header).encode()
    except RecursionError:
        text = b"[" * 5000
    return struct.pack("<Q", len(text)) + text + blob[8 + length :]


# Models

_MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mlp": ({"hidden": [5, 4]}, (6,)),
    "softmax": ({}, (2, 3)),
    "lenet": ({"hidden": [8]}, (1, 16, 16)),
    "lstm": ({"hidden": 4, "layers": 2}, (7,)),
    "transformer": ({"width": 8, "heads": 2}, (5,)),
    "deq-mlp": ({"width": 8, "hidden": 4}, (6,)),
    "resnet-14": ({"width": 8, "blocks": [1, 1, 1]}, (1, 8, 8)),
}


@cache
def _model_file(name: str) -> bytes:
    settings, shape = _MODELS[name]
    module = MODELS[name](**settings).build(shape, 3)
    described = {"shape": list(shape), "outputs": 3, "dtype": "float32", "model": {"name": name, **settings}}
    path = prepared() / f"{name}.safetensors"
    write_tensors_of_model(path, {k: t.clone() for k, t in module.state_dict().items()}, described)
    return path.read_bytes()


def models(rng: random.Random, folder: Path) -> bool:
    blob = _model_file(rng.choice([*_MODELS, *["mlp", "softmax"] * 6]))  # these are built quickly
    blob = mutate_bytes(rng, blob, JSON_SNIPPETS) if rng.random() < 0.4 else _with_header(rng, blob)
    (folder / "model.safetensors").write_bytes(blob)
    return works(lambda: eq.load_model(folder / "model.safetensors"))


@cache
def _saved_run() -> Path:
    folder = prepared() / "saved"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eq.train(small_mlp(), classification(3), "ditto", rounds=1).save(folder)
    return folder


def saved_runs(rng: random.Random, folder: Path) -> bool:
    run = folder / "run"
    shutil.copytree(_saved_run(), run)
    path = run / rng.choice(["models.safetensors", "models.safetensors", "models.safetensors", "run.toml"])
    blob = path.read_bytes()
    if path.suffix == ".toml":
        blob = mutate_bytes(rng, blob, TOML_SNIPPETS)
    else:
        blob = mutate_bytes(rng, blob, JSON_SNIPPETS) if rng.random() < 0.3 else _with_header(rng, blob)
    path.write_bytes(blob)

    def load() -> None:
        result = eq.load_result(run, small_mlp())
        for name in result.clients:
            result.personal(name)

    return works(load)


# Checkpoints


@cache
def _checkpoints() -> Path:
    folder = prepared() / "run"
    _train(folder, rounds=4)
    return folder


def _train(folder: Path, rounds: int, resume: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eq.train(small_mlp(), classification(3), "ditto", rounds=rounds, checkpoint_every=2, out=folder, resume=resume)


def checkpoints(rng: random.Random, folder: Path) -> bool:
    run = folder / "run"
    shutil.copytree(_checkpoints(), run)
    mutate(rng, run / "checkpoint", forge=False)  # digests do not protect against those who compute them again
    return works(lambda: _train(run, rounds=5, resume=True))


Case = Callable[[random.Random, Path], bool]
TARGETS: dict[str, Case] = {
    "toml-tables": toml_tables,
    "toml-text": toml_text,
    "toml-sweeps": toml_sweeps,
    **{f"data-{name}": data_case("everything", name) for name, cls in SOURCES.items() if not cls.draws and not cls.own},
    **{
        f"data-other-{name.replace(' ', '-')}": data_case("other_layouts", name)
        for name in ("shakespeare", "electricity", "electricity zipped", "medical-mnist")
    },
    **{f"data-{kind}": data_case("own", f"folder of {kind}") for kind in ("npz", "safetensors", "csv")},
    **({"data-parquet": data_case("own", "folder of parquet")} if find_spec("pyarrow") else {}),
    "messages": messages,
    "models": models,
    "saved-runs": saved_runs,
    "checkpoints": checkpoints,
}
"""The targets by name. Each returns whether its case worked (True) or was refused (False), and raises if it failed."""


def source_of(seed: int, target: str, number: int) -> random.Random:
    """The random numbers of a case, which its seed, target and number give again."""
    return random.Random(f"{seed} {target} {number}")


def run_case(target: str, rng: random.Random, folder: Path, seconds: float) -> bool:
    """Run one case in an empty folder within a time limit."""
    with time_limit(seconds):
        return TARGETS[target](rng, folder)
