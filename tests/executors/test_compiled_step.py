"""Compiled steps against those that are not, the cache that keeps them, and what is refused."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from equipoise.algorithms import Ditto, FedAvg
from equipoise.algorithms.base import Algorithm
from equipoise.config.engine import Engine, Schedule
from equipoise.data.federation import Federation, RaggedIndices
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.executors import aot_library
from equipoise.executors.build import execution_mode
from equipoise.executors.compiled_step import CompiledSteps, StepCompiler
from equipoise.executors.thread_trainer import ThreadTrainer
from equipoise.training.batches import Batch
from equipoise.training.task import Task

SIZES, BATCH = (8, 11), 3  # the last batch of each client is smaller, and not compiled


class SmallNet(nn.Module):
    """A convolution and a head, with everything that is not trained: frozen weights, a buffer, a constant."""

    shift: Tensor

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 2, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))
        self.scale = torch.tensor(scale)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh().flatten(1)
        return self.head(self.frozen(h) * self.scale.to(h.dtype) + self.shift)


def images() -> Federation:
    rng = torch.Generator().manual_seed(0)
    n = sum(SIZES)
    x, y = torch.randn(n, 2, 4, 4, generator=rng), torch.randint(0, 3, (n,), generator=rng)
    rows = np.split(np.arange(n), np.cumsum(SIZES)[:-1])
    none = RaggedIndices([np.empty(0, np.int64)] * len(SIZES))
    return Federation(x, y, ("a", "b"), RaggedIndices(rows), none, RaggedIndices(rows), classes=3)


def make_task(module: nn.Module | None = None, **options: Any) -> Task:
    torch.manual_seed(0)
    x, y = images().sample()
    return Task(SmallNet() if module is None else module, (x.double(), y), dtype=torch.float64, **options)


def run(algorithm: Algorithm, compiled: bool, workers: int = 1) -> dict[str, Tensor]:
    """Return the state of the server and of all clients after two rounds."""
    engine = Engine(compile=compiled, mode="threads", precision="float64", workers=workers)
    simulation = Simulation(make_task(), images(), algorithm, Schedule(rounds=2), engine)
    for _ in range(2):
        simulation.advance()
    simulation.close()
    clients = {f"{who} {k}": t for who in range(2) for k, t in simulation.store.get(who).items()}
    return {**simulation.server, **clients}


def compiled_steps(algorithm: Algorithm, report: Callable[[str], None] = print) -> tuple[ThreadTrainer, CompiledSteps]:
    task = make_task()
    federation = images().prepared(task.dtype, task.channels_last)
    compiler = StepCompiler(task, federation, algorithm, task.start(2), report)
    trainer = ThreadTrainer(task, task.replica(), federation, algorithm, 0, 1, 0, "batches")
    return trainer, compiler.for_thread()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder for all processes of this test run, because compiling takes long."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled-steps"


@pytest.fixture
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EQUIPOISE_CACHE", str(folder))
    return folder / "compiled"


@pytest.mark.slow
def test_a_compiled_step_equals_the_plain_one(cache: Path) -> None:
    trainer, steps = compiled_steps(FedAvg(batch=BATCH, lr=0.1))
    x, y = trainer.federation.gather(torch.arange(BATCH))
    batch, start = Batch(x, y), trainer.task.w0
    for lr in (0.1, 0.3):
        expected = trainer.open(start, "all")
        trainer.step(expected, batch, "all", lr)
        found = start.clone()
        steps["step", "all"].step(found, batch, lr)
        assert not torch.equal(found, start)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not steps["step", "all"].fits(Batch(x[:2], y[:2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(batch=BATCH, lr=0.1, epochs=2),
        # Its global model takes the steps of FedAvg by these rules, its personal models those with a pull.
        Ditto(batch=BATCH, lr=0.1, weight_decay=0.01, momentum=0.9, clip=1.0),
    ],
    ids=["fedavg", "ditto-momentum"],
)
def test_a_compiled_run_equals_the_plain_one(cache: Path, algorithm: Algorithm) -> None:
    plain, compiled = run(algorithm, False), run(algorithm, True)
    assert plain.keys() == compiled.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(compiled[name], expected, rtol=1e-9, atol=1e-12)
    in_two_threads = run(algorithm, True, workers=2)
    assert all(torch.equal(in_two_threads[name], t) for name, t in compiled.items())


@pytest.mark.slow
def test_what_is_in_the_cache_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, said = FedAvg(batch=BATCH, lr=0.1), list[str]()
    compiled_steps(algorithm)
    compiled = list(cache.glob("*.so"))
    monkeypatch.delattr(aot_library, "_compile")
    compiled_steps(algorithm, said.append)
    assert not said

    other = cache.parent.parent / f"damaged-{os.getpid()}"
    monkeypatch.setenv("EQUIPOISE_CACHE", str(other))
    (other / "compiled").mkdir(parents=True, mode=0o700)
    for path in compiled:  # truncated
        (other / "compiled" / path.name).write_bytes(path.read_bytes()[:1000])

    def copied(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], place: Path) -> Path:
        """Take what was compiled before in the place of compiling it again, which takes long."""
        key = aot_library._key(graph, inputs)
        return shutil.copyfile(next(path for path in compiled if path.name.startswith(key)), place / "step.so")

    monkeypatch.setattr(aot_library, "_compile", copied, raising=False)
    _, steps = compiled_steps(algorithm, said.append)
    assert len(said) == 1
    assert said[0].startswith("compiled the step in ")
    assert said[0].endswith(f" s; cached in {other / 'compiled'}")
    assert steps
    rebuilt = [path for path in (other / "compiled").glob("*.so") if path.stat().st_size > 1000]
    assert len(rebuilt) == 1

    monkeypatch.delattr(aot_library, "_compile")
    compiled_steps(algorithm, said.append)
    assert len(said) == 1
    rebuilt[0].chmod(0o777)  # now others may have written it
    with pytest.raises(EquipoiseError, match=r"cannot be compiled .*_compile"):
        compiled_steps(algorithm)


@pytest.mark.slow
def test_an_error_in_a_library_is_an_exception(cache: Path) -> None:
    def add_entries(v: Tensor, which: Tensor) -> tuple[()]:
        v.add_(v[which].sum())
        return ()

    given = [torch.ones(5), torch.tensor([1, 2])]
    function = aot_library.build_library(make_fx(add_entries, tracing_mode="fake")(*given), given).library.function()
    function(given)
    assert given[0].tolist() == [3.0] * 5
    with pytest.raises(RuntimeError, match="out of bounds"):
        function([given[0], torch.tensor([1, 77])])


def test_constants_shapes_and_formats_have_libraries_of_their_own() -> None:
    def key(scale: float, samples: int, dtype: torch.dtype) -> str:
        graph = torch.fx.symbolic_trace(nn.Identity())
        graph.register_buffer("scale", torch.tensor(scale))
        with graph.graph.inserting_after():
            graph.graph.get_attr("scale")
        return aot_library._key(graph, [torch.zeros(samples, dtype=dtype)])

    keys = {key(s, n, d) for s in (1.0, 2.0) for n in (1, 2) for d in (torch.float32, torch.float64)}
    assert len(keys) == 8
    assert key(1.0, 1, torch.float32) in keys


def refusal(module: nn.Module, **options: Any) -> str:
    with pytest.raises(EquipoiseError) as caught:
        execution_mode(Engine(compile=True, mode="threads"), make_task(module, **options))
    return str(caught.value)


def test_what_cannot_be_compiled_is_refused_with_the_reason() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    assert "draws random numbers (dropout)" in refusal(nn.Sequential(nn.Dropout(), *flat))
    assert "BatchNorm" in refusal(nn.Sequential(nn.BatchNorm2d(2), *flat))
    x, y = images().sample()
    task = Task(flat, (x, y), mixed=True)
    with pytest.raises(
        EquipoiseError, match=r"^engine.compile = true is not possible: engine.precision is 'bf16-mixed'; leave it out$"
    ):
        execution_mode(Engine(compile=True, mode="threads", precision="bf16-mixed"), task)


def test_no_compiler_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert refusal(SmallNet()) == "engine.compile = true needs a C++ compiler, and none was found; leave it out"


def test_a_model_that_decides_by_its_inputs_is_refused_and_leaves_torch_as_it_was() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.head(x.flatten(1))
            return output if output.sum() > 0 else 2 * output

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = Engine(compile=True, mode="threads", precision="float64")
        with pytest.raises(
            EquipoiseError, match=r"^engine.compile = true: the step of this model cannot be compiled \("
        ):
            Simulation(make_task(Deciding()), images(), FedAvg(batch=BATCH), Schedule(rounds=1), engine)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_an_algorithm_whose_every_step_has_a_term_is_refused() -> None:
    class OnlyTerms(FedAvg):
        def local_update(self, client: Any, down: Any, data: Any) -> Any:
            data.descend(down["w"], term=object())
            return client, down

    task = make_task()
    with pytest.raises(
        EquipoiseError, match="has no effect: every step of OnlyTerms has a loss term or a rule of its own"
    ):
        StepCompiler(task, images(), OnlyTerms(), task.start(2))
