"""Terms of whole batches: both executors add them to the loss as plain torch does, whatever a stack is padded with."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.algorithms import Local
from equipoise.algorithms.local_data import LocalData
from equipoise.config.uploads import UploadSettings
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from equipoise.representations.points import HEAD, OUTPUT
from equipoise.representations.terms import BatchTerm
from equipoise.state import State, Upload
from tests.support.problems import FULL, simulation


class Spread(BatchTerm):
    """Of representations: their mean's distance from a point and from the probe's, and a norm over the batch."""

    @staticmethod
    def whole(h: Sequence[Tensor], probed: Sequence[Tensor], y: Tensor, weights: Tensor, given: State) -> Tensor:
        apart = (weights @ h[0] - given.point).square().sum() + (weights @ (h[1] - probed[1])).square().sum()
        norm = torch.linalg.vector_norm((weights > 0).unsqueeze(-1) * (h[0] - given.rows[y]))
        return (given.lam * (apart + norm)).sum()


class Spreading(Local):
    """Local training with the term."""

    only: bool = False

    def term(self, data: LocalData, w0: Tensor) -> Spread:
        lam = torch.full_like(data.size, 0.7)
        point, rows = (torch.ones_like(w0[..., :k]) for k in (8, 24))
        given = State(lam=lam, point=point, rows=torch.cumsum(rows, -1).unflatten(-1, (3, 8)) / 24)
        return Spread((HEAD, OUTPUT), (w0 + 0.1,), given)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        term = self.term(data, client.v)
        if self.only:
            return State(v=data.term_gradient(term, client.v)), Upload()
        return State(v=data.descend(client.v, term=term)), Upload()


def finished(mode: str, **settings: Any) -> Simulation:
    run = simulation(Spreading(lr=0.05, **settings), mode=mode, rounds=1, participation=1.0)
    run.run()
    return run


def by_hand(run: Simulation, who: int, of_loss: float = 1.0) -> Tensor:
    """The gradient at w0 of the loss with the term on all samples of a client, by autograd on the module itself."""
    x, y = run.federation.gather(torch.from_numpy(run.federation.train[who]))
    w0 = run.task.w0
    module, other = (run.task.space.module(run.task.module, w) for w in (w0, w0 + 0.1))
    h, probed = ((net.body(x), net(x)) for net in (module, other))
    rows = torch.arange(1.0, 25.0, dtype=w0.dtype).reshape(3, 8) / 24
    apart = (h[0].mean(0) - 1).square().sum() + (h[1] - probed[1].detach()).mean(0).square().sum()
    value = 0.7 * (apart + (h[0] - rows[y]).norm())
    value = value + of_loss * torch.nn.functional.cross_entropy(h[1], y)
    found = dict(
        zip(dict(module.named_parameters()), torch.autograd.grad(value, list(module.parameters())), strict=True)
    )
    return torch.cat([found[entry.name].flatten() for entry in run.task.space.entries])


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_a_step_is_that_of_plain_torch_for_clients_of_any_size(mode: str) -> None:
    run = finished(mode, batch=FULL, steps=1)
    for who in range(6):
        wanted = run.task.w0 - 0.05 * by_hand(run, who)
        torch.testing.assert_close(run.store.get(who).v, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_its_gradient_alone_is_that_of_plain_torch(mode: str) -> None:
    run = finished(mode, batch=FULL, only=True)
    for who in range(6):
        torch.testing.assert_close(run.store.get(who).v, by_hand(run, who, 0.0), rtol=1e-9, atol=1e-12)


def test_both_executors_agree_with_batches_that_are_not_full_and_memory_of_steps() -> None:
    threads, stacked = (finished(mode, batch=4, epochs=2, momentum=0.5, clip=0.5) for mode in ("threads", "stacked"))
    for who in range(6):
        torch.testing.assert_close(stacked.store.get(who).v, threads.store.get(who).v, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("only", [False, True])
def test_privacy_of_samples_refuses_it(only: bool) -> None:
    privacy = UploadSettings(privacy=Privacy(unit="sample", clip=1.0, sigma=1.0))
    with pytest.raises(EquipoiseError, match="does not cover Spreading, which uses a loss of whole batches"):
        simulation(Spreading(only=only), uploads=privacy)
