"""The models by name, and the losses and metrics that they are trained and scored with."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import equipoise as eq
from equipoise.algorithms import FedAvg
from equipoise.data.federation import Federation, from_clients
from equipoise.errors import EquipoiseError
from equipoise.evaluation.scoreboard import summarize
from equipoise.losses import LOSSES
from equipoise.metrics import METRICS
from equipoise.models import MODELS
from equipoise.models.base import BodyAndHead
from equipoise.training.task import Task
from tests.support.marks import slow_except
from tests.support.models import QUICK, TEXT, built, inputs
from tests.support.problems import simulation

CROSS_ENTROPY, ACCURACY = LOSSES["cross-entropy"], METRICS["accuracy"]
NOT_STACKED = {
    "cnn-mmnist": "dropout",
    "lstm": "batched over clients",
    **{name: "random numbers" for name in MODELS if name.startswith("gaussian-")},
    **{name: "equilibrium layers" for name in MODELS if name.startswith("deq-")},
}


def targets(name: str, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if name in ("linear", "lstm"):
        return rng.normal(size=(len(x), 4))
    return rng.integers(0, 4, (len(x), 5) if name in TEXT else len(x))


def federation_for(name: str) -> Federation:
    rng = np.random.default_rng(5)
    clients = []
    for n in (3, 6, 9):
        x = inputs(name, n + 3, rng)
        y = targets(name, x, rng)
        clients.append({"train": (x[:n], y[:n]), "test": (x[n:], y[n:])})
    return from_clients(clients)


def task_for(name: str, **given: Any) -> Task:
    sample = federation_for(name).prepared(torch.float32, False).sample()
    return Task(built(name, **given), sample, loss="squared" if sample[1].is_floating_point() else "cross-entropy")


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "count"),
    [
        ("softmax", (1, 28, 28), 10, 7_850),
        ("mlp", (1, 28, 28), 10, 109_386),
        ("lenet", (3, 32, 32), 10, 62_006),
        ("cnn", (3, 32, 32), 10, 268_650),
        ("cnn-mmnist", (3, 64, 64), 6, 206_678),
        ("cnn-mmnist", (1, 64, 64), 6, 206_102),
        ("cnn-femnist", (1, 28, 28), 62, 214_590),
        ("deq-resnet-s", (1, 28, 28), 62, 984_896 + 129 * 62),  # the paper counts what is shared
        ("deq-resnet-m", (3, 32, 32), 10, 2_725_120 + 129 * 10),
        ("deq-resnet-m", (3, 32, 32), 100, 2_725_120 + 129 * 100),
    ],
)
def test_the_papers_parameter_counts(name: str, shape: tuple[int, ...], outputs: int, count: int) -> None:
    module = MODELS[name]().build(shape, outputs)
    assert sum(p.numel() for p in module.parameters()) == count
    assert module(torch.randn(2, *shape)).shape == (2, outputs)


@pytest.mark.parametrize(
    ("hidden", "before", "head"), [((120, 84), 61_156, 850), ((120,), 50_992, 1_210), ((), 2_872, 4_010)]
)
def test_lenets_head_may_begin_before_any_of_its_linear_layers(hidden: tuple[int, ...], before: int, head: int) -> None:
    """Learn2pFed's Table V, in thousands: 61.14, 50.99 and 2.87 parameters before it."""
    module = MODELS["lenet"](hidden=hidden).build((3, 32, 32), 10)
    assert [sum(p.numel() for p in part.parameters()) for part in (module.body, module.head)] == [before, head]


def test_a_linear_model_with_an_intercept_starts_at_zero() -> None:
    module = MODELS["linear"](bias=True).build((3,), 2)
    assert [p.shape for p in module.parameters()] == [(2, 3), (2,)]
    assert not any(p.any() for p in module.parameters())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention goes through a stack client by client
@pytest.mark.parametrize("name", slow_except(MODELS, *QUICK))
def test_every_model_trains_alike_in_both_modes(name: str) -> None:
    module, federation = built(name), federation_for(name)
    last = module.head[-1] if isinstance(module.head, nn.Sequential) else module.head
    assert isinstance(last, nn.Linear)
    loss = "squared" if federation.y.is_floating_point() else "cross-entropy"
    algorithm = FedAvg(lr=0.05, batch=4, steps=1)

    def run(mode: str) -> Any:
        run = simulation(algorithm, federation, module, mode=mode, loss=loss, rounds=1, participation=1.0)
        run.run()
        return run

    threaded = run("threads")
    for entry in threaded.task.space.entries:  # every parameter is at work
        assert not torch.equal(entry.view(threaded.server.w), entry.view(threaded.task.w0)), entry.name
    if name in NOT_STACKED:
        with pytest.raises(EquipoiseError, match=f"'stacked' is not possible here, because .*{NOT_STACKED[name]}"):
            run("stacked")
        return
    stacked = run("stacked")
    torch.testing.assert_close(stacked.server.w, threaded.server.w, rtol=1e-9, atol=1e-11)
    scores = stacked.scores.training.board().tables()["global"][:, 2:]
    assert np.isfinite(scores).all()
    np.testing.assert_allclose(
        scores, threaded.scores.training.board().tables()["global"][:, 2:], rtol=1e-9, atol=1e-11
    )


def test_linear_starts_at_zero_and_is_all_head() -> None:
    task = task_for("linear")
    assert (task.space.size, task.space.body_size) == (4 * 7, 0)
    assert not task.w0.any()


@pytest.mark.parametrize("t", range(5))
def test_the_transformer_looks_back_and_never_ahead(t: int) -> None:
    module = built("transformer").eval()
    x = torch.tensor([[0, 1, 2, 3, 0], [3, 3, 1, 0, 2]])
    changed = x.clone()
    changed[:, t] = (x[:, t] + 1) % 4
    before, after = module(x), module(changed)
    assert before.shape == (2, 5, 4)
    assert torch.equal(before[:, :t], after[:, :t])
    assert (before[:, t:] != after[:, t:]).any(-1).all()  # what comes later remembers it, to the end


@pytest.mark.parametrize("t", range(5))
def test_the_transformers_fixed_point_looks_back_and_never_ahead(t: int) -> None:
    """At the fixed point itself; a solve that is broken off knows of what comes by as much as is left to do."""
    module = built("deq-transformer", solver="plain", tol=1e-12, limit=500).double().eval()
    x = torch.tensor([[0, 1, 2, 3, 0], [3, 3, 1, 0, 2]])
    changed = x.clone()
    changed[:, t] = (x[:, t] + 1) % 4
    before, after = module(x), module(changed)
    torch.testing.assert_close(before[:, :t], after[:, :t], rtol=1e-9, atol=1e-10)
    assert ((before[:, t:] - after[:, t:]).abs().amax(-1) > 1e-8).all()


def test_the_transformer_knows_where_a_character_stands() -> None:
    output = built("transformer").eval()(torch.full((1, 5), 2))
    assert (output[0, 1:] - output[0, :-1]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_the_transformer_reads_whole_numbers_of_any_kind_and_shorter_texts(dtype: torch.dtype) -> None:
    module = built("transformer").eval()
    x = torch.tensor([[0, 1, 2, 3, 0]])
    torch.testing.assert_close(module(x[:, :3].to(dtype)), module(x)[:, :3])


def test_the_lstm_depends_on_the_order_of_time() -> None:
    module = MODELS["lstm"](layers=2).build((6,), 1)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    assert module(x).shape == (3, 1)
    torch.testing.assert_close(module(x), module(x.unsqueeze(-1)))  # a number, or a row with one number
    above, _ = module.body.lstm(x.unsqueeze(-1))  # what the upper layer gives at every point in time
    torch.testing.assert_close(module(x), module.head(above[:, -1]))
    assert (module(x) - module(x.flip(1))).abs().min() > 1e-6
    last = x.clone()
    last[:, -1] += 1  # the last point in time is not left out
    assert (module(x) - module(last)).abs().min() > 1e-6


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Outputs and targets of the three kinds: one of each a sample, one of each a position, one target for the last."""
    n, positions, classes = (draw(st.integers(1, 6)) for _ in range(3))
    kind = draw(st.sampled_from(["sample", "position", "last"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (n,) if kind == "sample" else (n, positions)
    output = 3 * torch.randn(*shape, classes, dtype=torch.float64, generator=generator)
    return output, torch.randint(0, classes, shape if kind == "position" else (n,), generator=generator)


@given(sequences())
@settings(max_examples=100)
def test_the_mean_loss_is_the_mean_of_each(pair: tuple[Tensor, Tensor]) -> None:
    each = CROSS_ENTROPY.each(*pair)
    assert each.shape == (len(pair[1]),)
    torch.testing.assert_close(each.mean(), CROSS_ENTROPY.mean(*pair), rtol=1e-12, atol=1e-12)


@given(sequences())
@settings(max_examples=100)
def test_loss_and_accuracy_count_every_position_or_the_last(pair: tuple[Tensor, Tensor]) -> None:
    output, target = pair
    if output.ndim == 3 and target.ndim == 1:
        output = output[:, -1]
    flat = F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))
    torch.testing.assert_close(CROSS_ENTROPY.mean(*pair), flat, rtol=1e-12, atol=1e-12)
    guess, truth = output.numpy().argmax(-1), target.numpy()
    counted = [np.atleast_1d(g == t).sum() / np.size(t) for g, t in zip(guess, truth, strict=True)]
    np.testing.assert_allclose(ACCURACY.each(*pair).numpy(), counted, rtol=1e-12)


def test_only_the_last_position_counts_where_there_is_one_target() -> None:
    output, target = torch.randn(4, 5, 3), torch.tensor([0, 1, 2, 1])
    other = output.clone()
    other[:, :-1] = torch.randn(4, 4, 3)
    for function in (CROSS_ENTROPY.mean, CROSS_ENTROPY.each, ACCURACY.each):
        assert torch.equal(function(output, target), function(other, target))


def test_one_output_a_sample_costs_no_operator_more() -> None:
    def plain(output: Tensor, target: Tensor) -> Tensor:
        return -output.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)

    pair = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    for ours, least in ((CROSS_ENTROPY.each, plain), (CROSS_ENTROPY.mean, lambda o, t: F.cross_entropy(o, t))):
        graphs = (make_fx(function)(*pair).graph for function in (ours, least))
        found, expected = ([n.target for n in graph.nodes if n.op == "call_function"] for graph in graphs)
        assert found == expected


def test_mse_is_the_square_of_rmse() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20 + i, 3)), rng.normal(size=20 + i)) for i in range(4)]
    module = MODELS["linear"]().build((3,), 1)
    rmse, mse = (
        eq.train(module, clients, FedAvg(lr=0.01), loss="squared", metric=metric, rounds=2, precision="float64")
        for metric in (None, "mse")
    )
    np.testing.assert_allclose(mse.scores()["global"][:, 3], rmse.scores()["global"][:, 3] ** 2, rtol=1e-12)
    np.testing.assert_allclose(mse.scores()["global"][:, 2:3], mse.scores()["global"][:, 3:], rtol=1e-12)
    assert mse.summary["global"]["mse"] == pytest.approx(rmse.summary["global"]["mse"], rel=1e-12)
    figures = summarize(np.array([[0.0, 1.0], [0.0, 3.0]]), np.empty(0), METRICS["rmse"])
    assert figures["mse"] == 5.0
    assert list(figures)[:3] == ["rmse", "rmse_std", "mse"]
    assert "mse" not in summarize(np.zeros((2, 2)), np.empty(0), ACCURACY)


class Pooled(nn.Module):
    """Layers that see a row a character, though a sample ends as one row."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.inner, self.head = nn.Embedding(30, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.letters(x)).relu().mean(1))


def test_auto_stacks_what_is_small() -> None:
    found = {name: task_for(name).mode() for name in MODELS}
    threads = {"lenet", "cnn", "cnn-mmnist", "cnn-femnist", "lstm", "transformer"}
    assert {name for name, mode in found.items() if mode == "threads"} >= threads
    assert {"linear", "softmax", "mlp"} <= {name for name, mode in found.items() if mode == "stacked"}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_auto_counts_the_rows_of_a_sample() -> None:
    assert task_for("transformer", width=8, layers=1).mode() == "stacked"
    for length, mode in ((5, "stacked"), (80, "threads")):
        task = Task(Pooled(), (torch.zeros(2, length, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)))
        assert (task.rows, task.mode()) == (length, mode)


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("cnn-mmnist", (3, 9, 64), "model.name = 'cnn-mmnist' needs images of at least 10 by 10; .*(3, 9, 64)"),
        ("cnn-mmnist", (64,), "'cnn-mmnist' needs images"),
        ("cnn-femnist", (1, 28, 3), "model.name = 'cnn-femnist' needs images of at least 4 by 4; .*(1, 28, 3)"),
        ("cnn", (3, 3, 32), "'cnn' needs images of at least 4 by 4"),
        ("lenet", (32, 32), "'lenet' needs images of at least 16 by 16"),
        ("lstm", (3, 8, 8), "'lstm' needs one number, or one row of numbers, for each point in time; .*(3, 8, 8)"),
        ("lstm", (), "'lstm' needs one number"),
        ("transformer", (3, 8), "'transformer' needs rows of characters; these samples have shape .3, 8."),
    ],
)
def test_a_shape_that_a_model_cannot_take_gets_its_sentence(name: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence) as caught:
        MODELS[name]().build(shape, 5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "side"), [("cnn-mmnist", 10), ("cnn-femnist", 4), ("cnn", 4), ("lenet", 16)])
def test_the_smallest_images_that_are_promised_work(name: str, side: int) -> None:
    assert MODELS[name]().build((1, side, side), 5)(torch.randn(2, 1, side, side)).shape == (2, 5)


def test_the_heads_of_the_attention_share_the_width() -> None:
    with pytest.raises(EquipoiseError, match=r"model.width = 10 is not a multiple of model.heads = 4"):
        MODELS["transformer"](width=10).build((5,), 4)


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 5).long(), "^the transformer reads characters as whole numbers"),
        (torch.zeros(2, 6).long(), torch.zeros(2, 6).long(), "^the transformer reads at most 5 characters"),
        (torch.zeros(2, 5).long(), torch.zeros(2, 4).long(), r"or one per position .*\(2, 5, 4\) and targets \(2, 4\)"),
        (torch.zeros(2, 5).long(), torch.zeros(2, 5, 4).long(), "needs one whole number per sample"),
        (torch.zeros(2, 5).long(), torch.zeros(2, 5), "one whole number per sample .*use 'squared'"),
        (torch.zeros(2, 5).long(), torch.zeros(2), "needs classes as whole numbers"),
    ],
)
def test_characters_and_targets_that_do_not_fit_get_their_sentence(x: Tensor, y: Tensor, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        Task(built("transformer"), (x, y))


def test_one_output_a_sample_takes_one_target_a_sample() -> None:
    module = BodyAndHead(nn.Flatten(), nn.Linear(5, 3))
    with pytest.raises(EquipoiseError, match=r"or one per position .*\(2, 3\) and targets \(2, 3\)"):
        Task(module, (torch.zeros(2, 5), torch.zeros(2, 3).long()))
