"""FedAS: the alignment, and the weights of clients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from equipoise.algorithms import FedAS, FedPer
from equipoise.algorithms.local_data import LocalData
from equipoise.engine.simulation import Simulation
from equipoise.runs.result import Result
from equipoise.state import RoundUploads, State, Upload
from tests.support.problems import FULL, simulation

COMMON: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch": 4}


def finished(algorithm: Any, **options: Any) -> Simulation:
    run = simulation(algorithm, **{"rounds": 3, **options})
    run.run()
    return run


class BySamples(FedAS):
    """Clients weigh by their numbers of samples."""

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        after, upload = super().local_update(client, down, data)
        return after, Upload(upload.message, upload.reference, data.size)


def test_without_alignment_and_by_samples_the_common_body_is_fedpers() -> None:
    fedas, fedper = finished(BySamples(align_lr=0.0, **COMMON)), finished(FedPer(**COMMON))
    assert torch.equal(fedas.server.theta, fedper.server.w_b)
    space = fedas.task.space
    for i in range(6):
        assert torch.equal(space.head(fedas.store.get(i).w), fedper.store.get(i).w_p)


def test_a_small_rate_of_the_alignment_is_none() -> None:
    one, two = (finished(FedAS(align_lr=rate, **COMMON)) for rate in (1e-300, 0.0))
    assert torch.equal(one.server.theta, two.server.theta)


@pytest.mark.parametrize("mode", ["threads", "stacked"])
def test_a_round_by_hand(mode: str) -> None:
    """A second round, in which a client's own body differs from the one that it receives."""
    algorithm = FedAS(align_lr=0.5, align_epochs=2, align_batch=FULL, lr=0.1, batch=FULL)
    run = simulation(algorithm, mode=mode, participation=1.0)
    run.advance()
    theta, before = run.server.theta, [run.store.get(i) for i in range(6)]
    weights: list[torch.Tensor] = []
    aggregate = run.aggregate

    def look(round: int, uploads: RoundUploads, names: Any) -> Any:
        weights.extend(upload.weight for upload in uploads.uploads if upload.weight is not None)
        return aggregate(round, uploads, names)

    run.aggregate = look  # type: ignore[method-assign]
    run.advance()
    run.close()
    space, sent = run.task.space, []
    for i in range(6):
        x, y = (t.double() if t.is_floating_point() else t for t in run.federation.gather(_own(run, i)))
        with torch.no_grad():
            old = run.task.to_module(before[i].w).double().body(x)
        P = torch.stack([old[y == c].mean(0) if (y == c).any() else torch.zeros(8).double() for c in range(3)])
        module = run.task.to_module(space.join(theta, space.head(before[i].w))).double()
        aligning = torch.optim.SGD(module.body.parameters(), lr=0.5)
        for _ in range(2):
            aligning.zero_grad()
            ((module.body(x) - P[y]).square().sum(1) / 8).mean().backward()
            aligning.step()
        training = torch.optim.SGD(module.parameters(), lr=0.1)
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        training.step()
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        square = sum(float(p.grad.square().sum()) for p in module.parameters())
        assert float(weights[i]) == pytest.approx(square, rel=1e-9)
        w = space.vector(module, torch.float64)
        torch.testing.assert_close(run.store.get(i).w, w, rtol=1e-8, atol=1e-11)
        sent.append(square * space.body(w))
    total = float(torch.cat(weights).sum())
    torch.testing.assert_close(run.server.theta, torch.stack(sent).sum(0) / total, rtol=1e-8, atol=1e-11)


def _own(run: Simulation, i: int) -> torch.Tensor:
    return torch.from_numpy(run.federation.train[i])


def test_who_has_no_gradient_left_has_no_weight_and_among_such_all_are_equal() -> None:
    class Still:
        """A client's data of which nothing can be learned any more."""

        def __init__(self, run: Simulation, square: float):
            self.space, self.square = run.task.space, square

        def descend(self, start: torch.Tensor) -> torch.Tensor:
            return start

        def gradient_squares(self, w: torch.Tensor) -> torch.Tensor:
            return torch.tensor([self.square], dtype=torch.float64)

    algorithm = FedAS(align_lr=0.0)
    run = simulation(algorithm)
    client, down = algorithm.init_client(run.start), algorithm.init_server(run.start)
    run.close()

    def shares(*squares: float) -> list[float]:
        sent = [algorithm.local_update(client, down, Still(run, each))[1] for each in squares]  # type: ignore[arg-type]
        return RoundUploads(tuple(range(len(sent))), tuple(sent)).weights().tolist()

    assert shares(0.0, 0.0) == [0.5, 0.5]
    assert shares(0.0, 1e-12)[0] < 1e-200


def test_an_absent_client_predicts_with_its_own_body() -> None:
    run = finished(FedAS(**COMMON), rounds=1, participation=2)
    absent = next(i for i in range(6) if i not in run.sample(1))
    down = run.algorithm.broadcast(run.server, absent)
    for who, expected in ((absent, run.task.w0), (run.sample(1)[0], run.store.get(run.sample(1)[0]).w)):
        assert torch.equal(Result(run).personal_vector(who).vector, expected)
    assert not torch.equal(down.theta, run.task.space.body(run.task.w0))
