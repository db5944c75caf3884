"""FedReCo: where it converges, what it sends, where models are split, and what its parts do by themselves."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from equipoise.algorithms import FedReCo, FedRep
from equipoise.algorithms.fedreco import Discord
from equipoise.algorithms.schema import infer_schema
from equipoise.data.federation import Federation, from_clients
from equipoise.engine.simulation import Simulation
from equipoise.equilibrium import layers as equilibria
from equipoise.errors import EquipoiseError
from equipoise.executors.base import ClientJob
from equipoise.executors.build import build_executor
from equipoise.executors.thread_trainer import ThreadTrainer
from equipoise.models import MODELS
from equipoise.models.base import BodyAndHead
from equipoise.representations.points import HEAD
from equipoise.state import State
from tests.support.marks import slow_except
from tests.support.problems import FULL, classification, simulation


def deep(seed: int = 0) -> nn.Module:
    """Three places to split it at."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = OrderedDict(one=nn.Linear(5, 6), a=nn.Tanh(), two=nn.Linear(6, 4), b=nn.Tanh())
        return BodyAndHead(nn.Sequential(body), nn.Linear(4, 3))


class Idle(nn.Module):
    """With a submodule that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.never = nn.Linear(5, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)


def smooth() -> Federation:
    rng = np.random.default_rng(1)
    parts = []
    for n in (8, 12, 16):
        x = rng.normal(size=(n, 5))
        y = np.tanh(x @ rng.normal(size=(5, 2))) @ rng.normal(size=(2, 1))
        parts.append({"train": (x, y), "test": (x, y)})
    return from_clients(parts)


def gammas(run: Simulation) -> list[float]:
    """The three squared gradient norms of the theory, by autograd from the definitions."""
    space, module, lam = run.task.space, run.task.module, run.algorithm.lam
    u_0 = run.server.u_0.clone().requires_grad_()
    names = [e.name for e in space.entries]

    def outputs(vector: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        views = space.views(vector)
        body = {n.removeprefix("body."): views[n] for n in names if n.startswith("body.")}
        head = {n.removeprefix("head."): views[n] for n in names if n.startswith("head.")}
        h = functional_call(module.body, body, (x,))
        return h, functional_call(module.head, head, (h,))

    F_0, second, third = torch.zeros(()).double(), [], []
    for who in range(len(run.federation)):
        x, y = run.federation.gather(torch.from_numpy(run.federation.train[who]))
        w = run.store.get(who).w.clone().requires_grad_()
        h, answer = outputs(w, x)
        h_0, _ = outputs(space.join(u_0, space.head(w)), x)
        H = (h - h_0).square().sum(-1).mean()
        f = (answer - y).square().mean()
        F_0 = F_0 + lam / 2 * H / len(run.federation)
        g = torch.autograd.grad(f + lam / 2 * H, w, retain_graph=True)[0]
        second.append(float(space.body(g).square().sum()))
        third.append(float(space.head(g).square().sum()))
    first = float(torch.autograd.grad(F_0, u_0)[0].square().sum())
    return [first, float(np.mean(second)), float(np.mean(third))]


@pytest.mark.slow
def test_all_three_gradients_of_the_theory_fall_to_zero_on_a_smooth_problem() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = BodyAndHead(nn.Sequential(nn.Linear(5, 2), nn.Tanh()), nn.Linear(2, 1))
    algorithm = FedReCo(lam=2.0, server_lr=0.5, lr=0.05, batch=FULL)
    options = {"loss": "squared", "mode": "stacked", "participation": 1.0, "evaluate_every": 10**6}
    run = simulation(algorithm, smooth(), module, rounds=10**6, **options)
    found = {}
    for round in range(1, 801):
        assert run.advance()
        if round in (1, 200, 800):
            found[round] = gammas(run)
    for first, middle, last in zip(*found.values(), strict=True):
        assert middle < 0.02 * first
        assert last < 0.2 * middle


def test_the_probe_takes_a_step_down_the_mean_of_the_gradients_that_are_sent() -> None:
    algorithm = FedReCo(lam=0.3, server_lr=0.2, lr=0.1, batch=FULL)
    run = simulation(algorithm, smooth(), deep_regression(), loss="squared", rounds=1, participation=1.0)
    before = run.server.u_0.clone()
    run.run()
    after = run.server.u_0
    slopes, space, body = [], run.task.space, run.task.module.body

    def h(u: Tensor, x: Tensor) -> Tensor:
        views = space.views(space.join(u, run.task.w0[space.body_size :]))
        return functional_call(body, {n.removeprefix("body."): t for n, t in views.items() if "body." in n}, (x,))

    for who in range(3):
        x, _ = run.federation.gather(torch.from_numpy(run.federation.train[who]))
        u_0 = before.clone().requires_grad_()
        H = (h(space.body(run.store.get(who).w), x) - h(u_0, x)).square().sum(-1).mean()
        slopes.append(torch.autograd.grad(H, u_0)[0])
    torch.testing.assert_close(after, before - 0.2 * torch.stack(slopes).mean(0), rtol=1e-10, atol=1e-13)


def deep_regression() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BodyAndHead(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 1))


@pytest.mark.parametrize("mode", slow_except(["threads", "stacked"], "threads"))
def test_without_pull_it_is_local_training_of_head_and_extractor_in_turn(mode: str) -> None:
    """FedRep with a single client averages nothing: it is the local training of both parts."""
    federation, common = classification(), {"lr": 0.05, "batch": 4, "head_epochs": 2}
    run = simulation(FedReCo(lam=0.0, **common), federation, mode=mode, participation=1.0)
    run.run()
    for who, name in enumerate(federation.names):
        x, y = federation.gather(torch.from_numpy(federation.train[who]))
        alone = from_clients([{"train": (x.numpy(), y.numpy()), "test": (x.numpy(), y.numpy())}], names=[name])
        other = simulation(FedRep(**common), alone, mode=mode, participation=1.0)
        other.run()
        vector = other.task.space.join(other.server.phi, other.store.get(0).h)
        torch.testing.assert_close(run.store.get(who).w, vector, rtol=1e-12, atol=1e-13)


def test_only_the_gradient_in_the_probe_is_sent_and_no_weight() -> None:
    run = simulation(FedReCo())
    assert set(run.schema.up) == {"g"}
    assert run.schema.parameters_shared == run.task.space.body_size
    assert set(run.schema.down) == {"u_0"}


def test_a_probe_that_never_moves_stays_as_it_began() -> None:
    run = simulation(FedReCo(server_lr=0.0, lr=0.1))
    before = run.server.u_0.clone()
    run.run()
    assert torch.equal(run.server.u_0, before)


def test_the_split_right_before_the_head_is_the_usual_one() -> None:
    usual, named = (simulation(FedReCo(lam=0.1, split=split), module=deep()) for split in ((), ("body.b",)))
    usual.run()
    named.run()
    assert torch.equal(usual.server.u_0, named.server.u_0)


def test_an_earlier_split_leaves_the_later_layers_to_the_head() -> None:
    algorithm = FedReCo(lam=0.1, split=("body.a",), lr=0.1, batch=4)
    run = simulation(algorithm, module=deep(), participation=1.0)
    first = run.task.space.entries[0].numel + run.task.space.entries[1].numel
    assert len(run.server.u_0) == first == 5 * 6 + 6
    before = run.store.get(0).w
    work = one_client(run, 3)
    v, u = algorithm._parts(State(u_0=run.server.u_0), work)
    for moves, expected in ((v, slice(first, None)), (u, slice(0, first))):
        moved = (work.descend(before, **moves) != before).nonzero().flatten()
        inside = torch.zeros(run.task.space.size, dtype=torch.bool)
        inside[expected] = True
        assert inside[moved].all()
        assert len(moved)


@pytest.mark.parametrize("mode", slow_except(["threads", "stacked"], "threads"))
def test_a_split_after_the_head_leaves_nothing_to_the_head(mode: str) -> None:
    run = simulation(FedReCo(lam=0.1, split=("head",), lr=0.1), module=deep(), mode=mode)
    run.run()
    assert len(run.server.u_0) == run.task.space.size


def one_client(run: Simulation, who: int) -> ThreadTrainer:
    return ThreadTrainer(run.task, run.task.replica(), run.federation, run.algorithm, 0, 1, who, "batches")


@pytest.mark.slow
def test_clients_may_be_split_at_different_layers() -> None:
    algorithm = FedReCo(lam=0.1, split=("body.a", "body.b"), lr=0.1, batch=4, server_lr=0.5)
    both = [simulation(algorithm, module=deep(), mode=mode, participation=1.0) for mode in ("threads", "stacked")]
    for run in both:
        run.run()
    torch.testing.assert_close(both[0].server.u_0, both[1].server.u_0, rtol=1e-9, atol=1e-11)
    run = both[0]
    first = 5 * 6 + 6
    sent = []
    for who in (0, 1):
        down = algorithm.broadcast(run.server, who)
        _, upload = algorithm.local_update(run.store.get(who), down, one_client(run, who))
        sent.append(upload.message.g)
    assert not sent[0][first:].any()  # it is split after the first layer, and knows nothing of the second
    assert sent[0][:first].any()
    assert sent[1][first:].any()
    # What the first client's extractor does not have is its own in the consensus model as well.
    mixed = algorithm.consensus_model(run.store.get(0), algorithm.broadcast(run.server, 0), one_client(run, 0))
    assert torch.equal(mixed[first:], run.store.get(0).w[first:])
    assert torch.equal(mixed[:first], run.server.u_0[:first])


def test_the_reach_of_a_place_is_what_it_depends_on() -> None:
    task = simulation(FedReCo(), module=deep()).task
    by_name = {entry.name: entry for entry in task.space.entries}
    for place, layers in (
        ("body.one", {"body.one"}),
        ("body.b", {"body.one", "body.two"}),
        (HEAD, {"body.one", "body.two"}),
    ):
        for name, entry in by_name.items():
            assert bool(task.point(place).reach[entry.offset]) == (name.rpartition(".")[0] in layers)
    assert [task.point(p).width for p in ("body.one", "body.b", HEAD)] == [6, 4, 4]
    with pytest.raises(EquipoiseError, match=r"no submodule 'body\.c'; did you mean 'body"):
        task.point("body.c")
    with pytest.raises(EquipoiseError, match="never calls its submodule"):
        simulation(FedReCo(), module=BodyAndHead(Idle(), nn.Linear(4, 3))).task.point("body.never")
    equilibrium = simulation(FedRep(), module=MODELS["deq-mlp"]().build((5,), 3)).task
    (place, _), *_ = equilibria(equilibrium.module)
    inside = next(name for name, _ in equilibrium.module.named_modules() if name.startswith(f"{place}."))
    with pytest.raises(EquipoiseError, match="lies within an equilibrium layer"):
        equilibrium.point(inside)


def test_the_variance_reduced_gradient_is_unbiased_and_exact_at_its_anchor() -> None:
    run = simulation(FedReCo(batch=6), module=deep())
    work = one_client(run, 3)  # 18 samples: three full batches
    rng = torch.Generator().manual_seed(0)
    v, anchor, probe = (run.task.w0 + 0.3 * torch.randn(run.task.w0.shape, generator=rng).double() for _ in range(3))
    term = Discord(probes=(probe,), given=State(weight=torch.ones(1).double()))
    there, here = work.term_gradient(term, anchor), work.term_gradient(term, v)
    corrected, raw, at_anchor = [], [], []
    at = work.open(v, "all")
    work.eval_mode()
    for batch, _ in work.batches(1, None, 0, None, term):
        amiss = there - work._gradient_at_anchor(anchor, at, batch, "all", term)
        assert torch.equal(at, v)
        raw.append(work.gradient(at, batch, "all", term, term_only=True).clone())
        corrected.append(raw[-1] + amiss)
        at_anchor.append(work._gradient_at_anchor(anchor, at, batch, "all", term) + amiss)
    assert len(raw) == 3
    torch.testing.assert_close(torch.stack(corrected).mean(0), here, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(raw[0], here)
    for found in at_anchor:
        torch.testing.assert_close(found, there, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", slow_except(["threads", "stacked"], "threads"))
def test_variance_reduction_takes_the_steps_of_svrg(mode: str) -> None:
    """Against a loop written out: g(u; b) - g(anchor; b) + g(anchor), for the pull alone."""
    algorithm = FedReCo(lam=0.5, server_lr=0.0, lr=0.1, batch=6, variance_reduction="partial")
    run = simulation(algorithm, classification(4), deep(), mode=mode, rounds=1, participation=1.0)
    w0, who = run.task.w0, 3
    run.run()
    work = one_client(run, who)
    v = work.descend(w0, part="head", epochs=1, stream=1)
    pull = Discord(probes=(w0,), given=State(weight=torch.full((1,), 0.25, dtype=torch.float64)))
    anchor, there = v.clone(), work.term_gradient(pull, v)
    at, body = work.open(v, "body"), run.task.space.part("body")
    for batch, _ in work.batches(1, None, 0, None, pull):
        wrong = work._gradient_at_anchor(anchor, at, batch, "body", pull)
        g = work.gradient(at, batch, "body", pull) - wrong + there[body]
        at[body] -= 0.1 * g
    torch.testing.assert_close(run.store.get(who).w, at, rtol=1e-9, atol=1e-12)


def test_variance_reduction_is_refused_where_a_batch_cannot_be_asked_twice() -> None:
    norm = BodyAndHead(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3))
    with pytest.raises(EquipoiseError, match="not possible for a model with BatchNorm"):
        simulation(FedReCo(variance_reduction="partial"), classification(3), norm).run()


def test_variance_reduction_with_full_batches_changes_nothing() -> None:
    one, two = (
        simulation(FedReCo(lam=0.2, batch=FULL, variance_reduction=v), module=deep()) for v in ("none", "partial")
    )
    one.run()
    two.run()
    torch.testing.assert_close(one.server.u_0, two.server.u_0, rtol=1e-10, atol=1e-13)


def test_a_terms_gradient_is_that_of_its_definition() -> None:
    """Threaded, the probe is asked many batches ahead; the gradient is that of the plain formula."""
    run = simulation(FedReCo(batch=4), module=deep())
    work = one_client(run, 4)
    v, probe = run.task.w0.clone(), run.task.w0 * 1.3
    found = work.term_gradient(Discord(probes=(probe,), given=State(weight=torch.ones(1).double())), v)
    x, _ = run.federation.gather(torch.from_numpy(run.federation.train[4]))
    v = v.requires_grad_()
    views = {n.removeprefix("body."): t for n, t in run.task.space.views(v).items() if n.startswith("body.")}
    still = {n.removeprefix("body."): t for n, t in run.task.space.views(probe).items() if n.startswith("body.")}
    body = run.task.module.body
    H = (functional_call(body, views, (x,)) - functional_call(body, still, (x,))).square().sum(-1).mean()
    torch.testing.assert_close(found, torch.autograd.grad(H, v)[0], rtol=1e-10, atol=1e-12)


def test_consensus_models_have_the_probe_in_them() -> None:
    run = simulation(FedReCo(lam=0.1, lr=0.1))
    run.run()
    executor = build_executor(run.engine, run.task, run.federation, run.algorithm, run.schedule)
    (model, _), *_ = executor.models(
        4, [ClientJob(2, run.store.get(2), run.algorithm.broadcast(run.server, 2))], "consensus"
    )
    executor.close()
    assert model is not None
    assert torch.equal(run.task.space.body(model.vector), run.server.u_0)
    assert torch.equal(run.task.space.head(model.vector), run.task.space.head(run.store.get(2).w))


def test_a_model_without_a_head_is_told_so() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(EquipoiseError, match="name the submodule that is the head"):
        infer_schema(FedReCo(), simulation(FedRep(), module=module, head=None).start)
