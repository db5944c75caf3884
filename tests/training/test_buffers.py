"""Averaged BatchNorm statistics against FedAvg in plain PyTorch, and which statistics belong to which model."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.algorithms import ALGORITHMS, Ditto, FedAvg, FedPer, Local
from equipoise.algorithms.local_data import Start
from equipoise.attacks import SignFlip
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import Federation, from_clients
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import GeometricMedian, Krum, MultiKrum, Reducer
from equipoise.runs.result import Result
from equipoise.state import RoundUploads, State
from equipoise.training.batches import batch_indices, batch_order
from equipoise.training.buffers import BufferTracker
from tests.support.problems import simulation

COMMON = {"lr": 0.05, "batch": 8}
EVERYBODY = {"rounds": 1, "participation": 1.0}


class Normed(nn.Module):
    """A body with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed()


def clients(count: int = 4) -> Federation:
    def samples(i: int) -> tuple[np.ndarray, np.ndarray]:
        return np.random.default_rng(i).normal(size=(20 + 8 * i, 5)) * (1 + i) + i, np.arange(20 + 8 * i) % 3

    return from_clients([samples(i) for i in range(count)])


def test_fedavg_is_everybody_elses_fedavg() -> None:
    """The mean of the clients' whole state dictionaries, weighted by samples; counters are left alone."""
    federation = clients()
    run = simulation(FedAvg(**COMMON), federation, normed(), **EVERYBODY)
    run.run()
    states, sizes = [], federation.train.lengths
    for who, name in enumerate(federation.names):
        module = normed().double().train()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        own = federation.train[who]
        for row in batch_indices(len(own), 8, 1, None, batch_order(0, 1, name, "batches", 0), 2):
            batch = torch.from_numpy(own[row[row >= 0]])
            optimizer.zero_grad()
            F.cross_entropy(module(federation.x[batch]), federation.y[batch]).backward()
            optimizer.step()
        states.append(module.state_dict())
    found = Result(run).global_model().state_dict()
    for name in found:
        if name.endswith("num_batches_tracked"):
            continue
        mean = sum(n * state[name] for n, state in zip(sizes, states, strict=True)) / sizes.sum()
        torch.testing.assert_close(found[name], mean, rtol=1e-9, atol=1e-12)


def test_statistics_are_announced_and_counted() -> None:
    average, local = (
        simulation(FedAvg(**COMMON, buffers=how), clients(), normed(), **EVERYBODY) for how in ("average", "local")
    )
    for run in (average, local):
        run.run()
    assert average.schema.up.keys() - local.schema.up.keys() == {"buffers"}
    assert average.schema.down["buffers"] == ((12,), torch.float64)  # a mean and a variance of six channels
    more = 4 * 12 * 8
    assert average.counters.bytes_up - local.counters.bytes_up == more
    assert average.counters.bytes_down - local.counters.bytes_down == more


@pytest.mark.parametrize("kind", sorted(ALGORITHMS.keys() - {"fedcr", "cfl"}))  # a Gaussian representation; groups
def test_methods_with_a_global_model_average_by_default(kind: str) -> None:
    algorithm = ALGORITHMS[kind]()
    run = simulation(algorithm, clients(), normed())
    assert ("buffers" in run.server) == (algorithm.global_model(run.server) is not None)
    run.close()


def test_dittos_global_model_has_its_own_statistics_and_personal_models_have_theirs() -> None:
    federation, module = clients(), normed()
    ditto = simulation(Ditto(**COMMON, lam=0.5), federation, copy.deepcopy(module), rounds=3, participation=0.5)
    fedavg = simulation(FedAvg(**COMMON), federation, copy.deepcopy(module), rounds=3, participation=0.5)
    for run in (ditto, fedavg):
        run.run()
    assert torch.equal(ditto.server.w, fedavg.server.w)
    assert torch.equal(ditto.server.buffers, fedavg.server.buffers)
    # With lam = 0, personal models are those of local training, statistics included.
    apart = simulation(Ditto(**COMMON, lam=0.0), federation, copy.deepcopy(module), rounds=3, participation=1.0)
    local = simulation(Local(**COMMON), federation, copy.deepcopy(module), rounds=3, participation=1.0)
    for run in (apart, local):
        run.run()
    for client in range(4):
        one, two = (Result(run).personal(client).state_dict() for run in (apart, local))
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize(
    "kind", ["fedprox", "flame", "pfedme", "fedadmm", "cfl", "fedper", "fedrep", "fedbabu", "fedavg-ft", "local"]
)
def test_all_train_with_either_and_any_number_of_threads(kind: str, buffers: str) -> None:
    lines = []
    for workers in (1, 2):
        algorithm = ALGORITHMS[kind](**COMMON, buffers=buffers)
        run = simulation(algorithm, clients(), normed(), rounds=2, workers=workers)
        run.run()
        lines.append(run.lines)
    assert lines[0] == lines[1]
    assert run.summary()["left_out"] == 0


def test_a_shared_body_is_scored_with_the_averaged_statistics() -> None:
    run = simulation(FedPer(**COMMON, buffers="average"), clients(), normed(), **EVERYBODY)
    run.run()
    expected = run.server.buffers
    for client in range(4):
        body = Result(run).personal(client).body[1]
        assert torch.equal(torch.cat([body.running_mean, body.running_var]), expected)


def test_privacy_keeps_them_at_home() -> None:
    private = UploadSettings(privacy=Privacy(clip=1.0, sigma=1.0))
    run = simulation(FedAvg(**COMMON), clients(), normed(), uploads=private)
    assert "buffers" not in run.schema.up
    run.close()
    with pytest.raises(EquipoiseError, match=r"algorithm.buffers = 'average' is not possible with \[privacy\]"):
        simulation(FedAvg(**COMMON, buffers="average"), clients(), normed(), uploads=private)


def test_no_attack_makes_a_variance_negative() -> None:
    attacked = UploadSettings(attack=SignFlip(clients=("client-1", "client-2", "client-3")))
    run = simulation(FedAvg(**COMMON), clients(), normed(), uploads=attacked, rounds=2, participation=1.0)
    run.run()
    assert (run.server.buffers[6:] >= 0).all()
    assert run.summary()["global"]["loss"] is not None


def test_a_model_is_recognised_by_its_memory() -> None:
    shared, own = torch.zeros(2), torch.ones(2)
    kept, trained = torch.randn(5), torch.randn(5)
    tracker = BufferTracker(shared, own, State(v=kept))
    assert tracker.of_state(State(w=trained)) is own
    tracker.record(trained, after := torch.full((2,), 2.0))
    tracker.record(torch.randn(5), last := torch.full((2,), 3.0))
    assert tracker.of(kept[:3]) is own
    assert tracker.of(trained[2:]) is after
    assert tracker.of(trained + 0) is shared
    assert tracker.of_state(State(w=trained[:2], z=torch.ones(1))) is after
    assert tracker.of_state(State(u=trained + kept)) is last


def test_groups_of_clients_keep_their_statistics() -> None:
    run = simulation(ALGORITHMS["cfl"](**COMMON), clients(), normed())
    assert "buffers" not in run.server
    run.close()


@pytest.mark.parametrize("reducer", [Krum(), MultiKrum(), GeometricMedian()])
def test_parameters_and_statistics_are_reduced_together(reducer: Reducer) -> None:
    """Krum selects one client's whole model; other rules weigh both parts alike."""
    run = simulation(
        FedAvg(**COMMON), clients(6), normed(), uploads=UploadSettings(reducer=reducer), rounds=1, participation=1.0
    )
    executor, jobs = run.executor, [run.job(who) for who in run.training]
    uploads = [result.upload for result in executor.train(1, jobs, lambda: False)]
    run.run()
    expected = reducer(RoundUploads(tuple(range(6)), tuple(uploads), run.placement))
    assert torch.equal(run.server.w, expected.w)
    assert torch.equal(run.server.buffers, expected.buffers)


def test_where_all_last_uploads_count_all_last_statistics_count() -> None:
    """FedADMM with one client per round: the mean is over all clients, of parameters and of statistics."""
    run = simulation(ALGORITHMS["fedadmm"](**COMMON), clients(), normed(), rounds=6, participation=1)
    run.run()
    sent = [run.store.get(who)["sent.buffers"] for who in range(4)]
    torch.testing.assert_close(run.server.buffers, torch.stack(sent).mean(0), rtol=1e-12, atol=1e-12)


def test_a_client_that_does_not_train_keeps_its_own() -> None:
    own = torch.ones(2)
    tracker = BufferTracker(torch.zeros(2), own, State(theta=torch.randn(3)))
    assert tracker.of_state(State(theta=tracker.kept[0])) is own


class Reserved(FedAvg):
    def init_server(self, start: Start) -> State:
        return State(w=start.w0, buffers=start.w0)


def test_their_name_is_reserved() -> None:
    with pytest.raises(EquipoiseError, match="Reserved has a field named 'buffers'"):
        simulation(Reserved(), clients(), normed())
