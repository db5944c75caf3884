"""What a run costs: parameters, bytes, rounds to a score, and the memory of a client's step."""

import pytest
import torch
from torch import nn

from equipoise.algorithms import FeDEQ, FedRep, Local
from equipoise.algorithms.base import Algorithm
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.models.base import BodyAndHead
from equipoise.training.memory_usage import peak_tensor_bytes
from equipoise.training.task import Task
from tests.support.problems import LeastSquares, linear_module, simulation


def test_every_summary_says_what_the_method_costs(algorithm: Algorithm) -> None:
    run = simulation(algorithm, rounds=3, participation=0.5, targets=(0.0, 1.0))
    run.run()
    summary = run.summary()
    sent = summary["bytes_up"] + summary["bytes_down"]
    assert summary["bytes_a_round"] == round(sent / 3)
    assert summary["parameters_sent"] == sent // 8
    assert summary["step_memory_mb"] > 0
    kinds = {"personal", "consensus", "global", "hybrid"} & summary.keys()
    assert kinds
    assert summary["rounds_to"].keys() == kinds
    for kind, first in summary["rounds_to"].items():
        perfect = (line["round"] for line in run.lines if line[kind]["accuracy"] == 1)
        assert first == {"0": 1, "1": next(perfect, None)}


def test_parameters_shared_and_personal_are_counted_apart() -> None:
    run = simulation(FeDEQ(), rounds=1)
    run.run()
    body, head = run.task.space.body_size, run.task.space.size - run.task.space.body_size
    summary = run.summary()
    assert summary["parameters_shared"] == body
    assert summary["parameters_personal"] == 2 * body + head  # theta_i, lam_i and w_i
    rep = simulation(FedRep(), rounds=1)
    rep.run()
    assert (rep.summary()["parameters_shared"], rep.summary()["parameters_personal"]) == (body, head)


def test_an_accuracy_above_one_is_no_target() -> None:
    with pytest.raises(EquipoiseError, match="an accuracy is at most 1"):
        simulation(Local(), targets=(80.0,))


def test_where_less_is_better_a_target_is_reached_from_above(problem: LeastSquares) -> None:
    run = simulation(
        Local(lr=0.1, batch=8), problem.federation(), linear_module(), loss="squared", rounds=20, targets=(1e-9, 0.5)
    )
    run.run()
    first = next(line["round"] for line in run.lines if line["personal"]["rmse"] <= 0.5)
    assert first > 1
    assert run.summary()["rounds_to"]["personal"] == {"1e-09": None, "0.5": first}


def test_the_first_round_that_reached_a_score_is_told() -> None:
    run = simulation(Local(lr=0.2, batch=4), rounds=12, evaluate_every=2)
    run.run()
    scores = {line["round"]: line["personal"]["accuracy"] for line in run.lines if "personal" in line}
    target = sorted(scores.values())[len(scores) // 2]
    again = simulation(Local(lr=0.2, batch=4), rounds=12, evaluate_every=2, targets=(target,))
    again.run()
    wanted = next(round for round, score in scores.items() if score >= target)
    assert again.summary()["rounds_to"]["personal"] == {f"{target:g}": wanted}


def test_bytes_are_those_of_the_tensors_that_live_at_once() -> None:
    def two_at_once() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1
        del a
        return b * 2  # b and its double; a is gone

    assert peak_tensor_bytes(two_at_once) == 8000
    x = torch.ones(1000)
    assert peak_tensor_bytes(lambda: x.view(10, 100)[3]) == 0  # what was there before is not counted
    assert peak_tensor_bytes(lambda: x + x) == 4000


def test_a_step_keeps_what_backward_needs() -> None:
    """A chain of tanh keeps each of its outputs; without gradients it would keep two at a time."""
    n, width = 64, 128
    layers = [nn.Linear(width, width, bias=False)] + [nn.Tanh() for _ in range(10)]
    module = BodyAndHead(nn.Sequential(*layers), nn.Linear(width, 3, bias=False))
    task = Task(module, (torch.zeros(2, width), torch.zeros(2, dtype=torch.long)))
    activations, parameters = 11 * 4 * n * width, 4 * (width * width + 3 * width)
    assert activations + parameters < task.step_bytes(n) < 1.5 * (activations + 2 * parameters)


def test_a_batch_is_no_larger_than_the_largest_client_and_warm_starts_are_counted() -> None:
    torch.manual_seed(0)
    sample = (torch.randn(2, 1, 12, 12), torch.zeros(2, dtype=torch.long))
    settings = {"channels": 8, "inner": 16, "hidden": (16, 16)}
    task, off = (
        Task(MODELS["deq-resnet-s"](warm_start=warm, **settings).build((1, 12, 12), 10), sample)
        for warm in ("update", "off")
    )
    assert task.step_bytes(10**9, 8) == task.step_bytes(8, 8)
    table = 4 * 8 * 6 * 6  # of one sample: eight channels of 6 by 6
    assert task.step_bytes(8, 1008) - task.step_bytes(8, 8) >= 1000 * table
    assert off.step_bytes(8, 1008) == off.step_bytes(8, 8)


@pytest.mark.parametrize("limit", [3, 30])
def test_memory_of_an_equilibrium_step_does_not_depend_on_its_iterations(limit: int) -> None:
    torch.manual_seed(0)
    settings = {"channels": 8, "inner": 16, "hidden": (16, 16), "window": 2, "tol": 0.0}
    sample = (torch.randn(2, 1, 12, 12), torch.zeros(2, dtype=torch.long))
    bytes_of = {
        k: Task(MODELS["deq-resnet-s"](limit=k, **settings).build((1, 12, 12), 10), sample).step_bytes(8)
        for k in (6, limit + 6)
    }
    assert bytes_of[limit + 6] <= 1.02 * bytes_of[6]


def shared(name: str, shape: tuple[int, ...] = (3, 32, 32), **settings: object) -> int:
    return sum(p.numel() for p in MODELS[name](**settings).build(shape, 10).body.parameters())


@pytest.mark.slow
def test_a_stride_at_the_stem_only_shrinks_what_convolutions_work_on() -> None:
    for name in ("resnet-14", "deq-residual", "deq-cnn", "resnet-5-blocks", "cnn-L"):
        assert shared(name, stride=2) == shared(name)
        small, large = (
            Task(MODELS[name](stride=s).build((3, 16, 16), 10), (torch.randn(2, 3, 16, 16), torch.zeros(2).long()))
            for s in (2, 1)
        )
        assert small.step_bytes(4) < large.step_bytes(4)
    narrow = {"channels": 16, "inner": 32, "hidden": (64, 48)}
    conv = 9 * (3 * 16 + 2 * 16 * 32) + 2 * (16 + 32 + 16 + 16)  # stem, block, and their normalisations
    for stride, side in ((1, 8), (2, 4), (4, 2)):
        dense = 16 * side * side * 64 + 64 + 64 * 48 + 48 + 2 * 48
        assert shared("deq-resnet-s", stride=stride, **narrow) == conv + dense


def test_widths_double_from_group_to_group() -> None:
    convs = [
        p.shape
        for name, p in MODELS["resnet-14"](blocks=(1, 1, 1, 1), width=8).build((3, 32, 32), 10).named_parameters()
        if p.ndim == 4 and "second" in name
    ]
    assert [shape[0] for shape in convs] == [8, 16, 32, 64]
    one, two = (shared("transformer-8", (20,), layers=k, width=32) for k in (4, 5))
    block = 2 * 2 * 32 + 32 * 96 + 96 + 32 * 32 + 32 + 32 * 128 + 128 + 128 * 32 + 32
    assert two - one == block
