"""FedDBE: the shift that clients keep, and the pull of mean representations to a consensus."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from equipoise.algorithms import FedAvg, FedDBE
from equipoise.algorithms.feddbe import Shift
from equipoise.algorithms.local import Local
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.algorithms.own_modules import HasOwnModules
from equipoise.api import Result
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.state import State, Upload
from tests.support.problems import FULL, classification, simulation, small_mlp

COMMON: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch": 4}


def finished(algorithm: Any, **options: Any) -> Simulation:
    run = simulation(algorithm, **{"rounds": 2, "participation": 1.0, **options})
    run.run()
    return run


def features(w: Tensor, run: Simulation, x: Tensor) -> Tensor:
    """What a model of P numbers makes of samples before its head."""
    module = small_mlp().double()
    layer = module.body.encoder
    sizes = [layer.weight.numel(), layer.bias.numel()]
    weight, bias, _ = w.split([*sizes, len(w) - sum(sizes)])
    return (x @ weight.reshape(layer.weight.shape).T + bias).tanh()


def loss(w: Tensor, z: Tensor, run: Simulation, x: Tensor, y: Tensor) -> Tensor:
    head = w[-27:]
    return F.cross_entropy((features(w, run, x) + z) @ head[:24].reshape(3, 8).T + head[24:], y)


def samples(run: Simulation, who: int) -> tuple[Tensor, Tensor]:
    return run.federation.gather(torch.from_numpy(run.federation.train[who]))


def trained(
    run: Simulation, who: int, w: Tensor, z: Tensor, z_g: Tensor, *, kappa: float, mu: float, steps: int
) -> Any:
    """The client's w, z and r after full steps, by autograd on the formulas of the paper."""
    (x, y), r, lr = samples(run, who), torch.zeros(8).double(), run.algorithm.lr
    for _ in range(steps):
        w, z = w.detach().requires_grad_(), z.detach().requires_grad_()
        now = (1 - mu) * r + mu * features(w, run, x).mean(0)
        value = loss(w, z, run, x, y) + kappa / (2 * len(r)) * (now - z_g).square().sum()
        g_w, g_z = torch.autograd.grad(value, (w, z))
        w, z, r = w.detach() - lr * g_w, z.detach() - lr * g_z, now.detach()
    return w, z, r


def test_without_both_parts_it_is_fedavg() -> None:
    one, two = finished(FedDBE(kappa=0.0, prbm=False, **COMMON)), finished(FedAvg(**COMMON))
    torch.testing.assert_close(one.server.w, two.server.w, rtol=1e-12, atol=1e-14)
    assert one.schema.parameters_shared == two.schema.parameters_shared  # nothing else is sent
    assert Result(one).global_model() is not None


def test_the_first_round_is_fedavgs_and_finds_the_mean_of_all_features() -> None:
    one, two = finished(FedDBE(**COMMON), rounds=1), simulation(FedAvg(**COMMON), rounds=1, participation=1.0)
    kept: list[tuple[int, Tensor]] = []
    original = FedAvg.local_update

    def keep(self: FedAvg, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        found = original(self, client, down, data)
        kept.append((int(data.size), found[1].message.w))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedAvg, "local_update", keep)
        two.run()
    torch.testing.assert_close(one.server.w, two.server.w, rtol=1e-12, atol=1e-14)
    sums = [features(w, one, samples(one, (n - 3) // 5)[0]).sum(0) for n, w in kept]
    total = sum(n for n, _ in kept)
    torch.testing.assert_close(one.server.z_g, torch.stack(sums).sum(0) / total, rtol=1e-9, atol=1e-12)
    assert not any(one.store.get(i).z.any() for i in range(6))


def test_the_models_of_the_first_round_may_be_thrown_away() -> None:
    run = finished(FedDBE(**COMMON, restart=True), rounds=1)
    assert torch.equal(run.server.w, run.algorithm.init_server(run.start).w)
    kept = finished(FedDBE(**COMMON), rounds=1)
    assert torch.equal(run.server.z_g, kept.server.z_g)


@pytest.mark.parametrize(("mu", "mode"), [(1.0, "threads"), (0.3, "threads"), (0.3, "stacked")])
def test_a_round_is_that_of_the_papers_formulas(mu: float, mode: str) -> None:
    """With mu = 1 the pull is that of the batch's mean; else it follows the running mean."""
    steps, kappa = 3, 5.0
    consensus = "samples" if mu == 1 else "running"
    algorithm = FedDBE(lr=0.05, batch=FULL, steps=steps, kappa=kappa, momentum_mean=mu, consensus=consensus)
    run = simulation(algorithm, rounds=2, participation=1.0, mode=mode)
    zero = torch.zeros(8).double()
    before, z_g = run.server.w, torch.zeros(8).double()
    sizes = torch.tensor([len(run.federation.train[i]) for i in range(6)]).double()
    p = sizes / sizes.sum()
    run.advance()
    if mu < 1:
        for i in range(6):
            algorithm_r = _first_round(run, i, before, mu, steps)
            z_g += p[i] * algorithm_r
        torch.testing.assert_close(run.server.z_g, z_g, rtol=1e-9, atol=1e-12)
    middle, z_g = run.server.w, run.server.z_g
    run.advance()
    found = [trained(run, i, middle, zero, z_g, kappa=kappa, mu=mu, steps=steps) for i in range(6)]
    for i, (_, z, _) in enumerate(found):
        torch.testing.assert_close(run.store.get(i).z, z, rtol=1e-8, atol=1e-11)
    mean = sum(p[i] * w for i, (w, _, _) in enumerate(found))
    torch.testing.assert_close(run.server.w, mean, rtol=1e-8, atol=1e-11)
    assert torch.equal(run.server.z_g, z_g)  # it is never made again
    run.close()


def _first_round(run: Simulation, who: int, w: Tensor, mu: float, steps: int) -> Tensor:
    """The running mean of a round without both parts: z stays zero, and nothing is pulled."""
    (x, y), r = samples(run, who), torch.zeros(8).double()
    for _ in range(steps):
        w = w.detach().requires_grad_()
        r = (1 - mu) * r + mu * features(w.detach(), run, x).mean(0)
        (g,) = torch.autograd.grad(loss(w, torch.zeros(8).double(), run, x, y), w)
        w = w.detach() - run.algorithm.lr * g
    return r


def test_the_shift_is_a_folded_bias() -> None:
    run = finished(FedDBE(**COMMON), rounds=3)
    x = torch.randn(9, 5).double()
    for i in range(6):
        w, z = run.server.w, run.store.get(i).z
        assert z.any()
        folded = small_mlp().double()
        names = [name for name, _ in folded.named_parameters()]
        sizes = [p.numel() for p in folded.parameters()]
        parameters = {
            name: part.reshape(p.shape)
            for name, part, p in zip(names, w.split(sizes), folded.parameters(), strict=True)
        }
        parameters["head.bias"] = parameters["head.bias"] + parameters["head.weight"] @ z
        torch.testing.assert_close(Result(run).personal(i)(x), functional_call(folded, parameters, (x,)))


class OnlyShift(HasOwnModules, Local):
    """Local training of the shift alone."""

    def around(self, head: Any) -> Any:
        return FedDBE().around(head)

    def init_client(self, start: Start) -> State:
        return State(v=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        return State(v=data.descend(client.v, part=data.space.mask(Shift))), Upload()


def test_a_shift_alone_gives_the_best_bias_for_the_weights_as_they_are() -> None:
    run = finished(OnlyShift(lr=2.0, batch=FULL, steps=600), rounds=1, mode="stacked")
    for i in (4, 5):
        x, y = samples(run, i)
        module = Result(run).personal(i)
        weight, z = module.head.head.layer.weight.detach(), run.store.get(i).v[run.task.space.span(Shift)]
        outputs = (module.body(x) + z) @ weight.T + module.head.head.layer.bias.detach()
        # At the best bias, the mean probability of each class is its share of the samples.
        shares = F.one_hot(y, 3).double().mean(0)
        torch.testing.assert_close(outputs.softmax(1).mean(0).detach(), shares, rtol=0, atol=1e-3)


def test_a_newcomer_learns_its_shift_alone() -> None:
    run = simulation(FedDBE(**COMMON), classification().holding_out(0.2, 0), rounds=2, participation=1.0)
    run.run()
    (unseen,) = run.federation.unseen
    vector, head = Result(run).personal_vector(unseen).vector, run.server.w
    assert torch.equal(vector[: len(head)], head)
    assert vector[run.task.space.span(Shift)].any()


@pytest.mark.parametrize("how", [{"optimizer": "adam"}, {"momentum": 0.5}, {"clip": 1.0}, {"weight_decay": 0.1}])
def test_a_running_mean_needs_plain_steps(how: dict[str, Any]) -> None:
    FedDBE(**how)
    for own in ({"momentum_mean": 0.5}, {"consensus": "running"}):
        with pytest.raises(EquipoiseError, match="FedDBE"):
            FedDBE(**own, **how)
