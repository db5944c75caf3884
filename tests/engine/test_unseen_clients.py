"""Clients that take no part in training: they change nothing, adapt as the method says, and are scored apart."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import equipoise
from equipoise.algorithms import (
    FeatureDecay,
    FedBABU,
    FedBN,
    FedCP,
    FedProto,
    FedReCo,
    LeastSquares,
    LGFedAvg,
    Moon,
    PerFedAvg,
    PFedFDA,
    SharedLeastSquares,
)
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import PredictsFromSamples
from equipoise.data.federation import RaggedIndices
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead
from tests.support.problems import classification, simulation, small_mlp

MODES = ["threads", "stacked"]
ALL_OF_IT = (FeatureDecay, FedBABU, FedCP, FedProto, FedReCo, LGFedAvg, Moon)
"""Methods that need to know the head and adapt the whole model all the same."""


def held_out(*names: str):
    return replace(classification(), unseen=frozenset(names))


@cache
def with_newcomer(algorithm: Algorithm, mode: str) -> Simulation:
    """Run an algorithm once for all tests that only look at what it did for the client that it never saw."""
    run = simulation(algorithm, held_out("client-3"), mode=mode, rounds=3)
    run.run()
    return run


def test_training_goes_as_if_they_did_not_exist(in_mode: tuple[Algorithm, str]) -> None:
    algorithm, mode = in_mode
    everybody = held_out("client-1", "client-4")
    keep = [0, 2, 3, 5]
    others = replace(
        everybody,
        names=tuple(everybody.names[i] for i in keep),
        unseen=frozenset(),
        **{s: RaggedIndices([getattr(everybody, s)[i] for i in keep]) for s in ("train", "validation", "test")},
    )
    with_them, without = (simulation(algorithm, f, mode=mode, participation=3, rounds=3) for f in (everybody, others))
    with_them.run()
    without.run()
    assert with_them.server.keys() == without.server.keys()
    assert all(torch.equal(with_them.server[k], without.server[k]) for k in without.server)
    whole, few = with_them.summary(), without.summary()
    assert whole["clients"] == 4
    for key in ("personal", "global", "hybrid", "bytes_up", "gradient_samples"):
        assert whole.get(key) == few.get(key)
    assert "unseen" not in few


def test_they_adapt_the_head_or_all_as_the_method_says(in_mode: tuple[Algorithm, str]) -> None:
    algorithm, mode = in_mode
    run = with_newcomer(algorithm, mode)
    result = equipoise.api.Result(run)
    model = result.personal_vector("client-3")
    space = run.task.space
    start = run.algorithm.global_model(run.server)
    if isinstance(algorithm, PredictsFromSamples):  # its own samples are all that is personal
        assert torch.equal(model.vector, start)
        assert run.summary()["unseen"]["adaptation_samples"] == 0
        return
    if isinstance(algorithm, (LeastSquares, SharedLeastSquares)):  # the head in closed form, on the initial body
        assert torch.equal(space.body(model.vector), space.body(run.task.w0))
        assert not torch.equal(space.head(model.vector), space.head(run.task.w0))
        assert run.summary()["unseen"]["adaptation_samples"] == 0
        return
    if isinstance(algorithm, PFedFDA):  # the head from its own and the common statistics, without training
        assert torch.equal(space.body(model.vector), run.server.phi)
        assert not torch.equal(space.head(model.vector), space.head(run.task.w0))
        assert run.summary()["unseen"]["adaptation_samples"] == 0
        return
    if isinstance(algorithm, FedBN):  # nothing to adapt, as the model has no normalisation
        assert torch.equal(model.vector, run.server.w)
        assert run.summary()["unseen"]["adaptation_samples"] == 0
        return
    all_of_it = isinstance(algorithm, ALL_OF_IT) or "network" in algorithm.init_client(run.start)
    if algorithm.requires.head and not all_of_it:
        body = next(iter(run.server.values()))  # or the whole common model
        assert torch.equal(space.body(model.vector), space.body(body))
        assert not torch.equal(space.head(model.vector), space.head(run.task.w0))
    else:
        start = run.task.w0 if start is None else start
        assert not torch.equal(space.body(model.vector), space.body(start))
        assert not torch.equal(space.head(model.vector), space.head(start))
    samples = len(run.federation.train[3]) * algorithm.adapt_epochs
    if isinstance(algorithm, PerFedAvg):  # a step on one batch, as for all others
        samples = algorithm.batch * algorithm.personal_steps
    samples *= 2 if isinstance(algorithm, (FeatureDecay, FedReCo)) else 1  # head and extractor in turn
    assert run.summary()["unseen"]["adaptation_samples"] == samples


def test_both_modes_give_the_same_adapted_models(one_of_a_kind: Algorithm) -> None:
    runs = [simulation(one_of_a_kind, held_out("client-0", "client-5"), mode=mode) for mode in MODES]
    for run in runs:
        run.run()
    for kind, table in runs[0].scores.tables().items():
        np.testing.assert_allclose(runs[1].scores.tables()[kind], table, rtol=1e-9, atol=1e-11)


def test_scores_are_those_of_the_adapted_model(algorithm: Algorithm) -> None:
    run = with_newcomer(algorithm, "threads")
    module = equipoise.api.Result(run).personal("client-3")
    x, y = run.federation.gather(torch.from_numpy(run.federation.test[3]))
    accuracy = float((module(x).argmax(-1) == y).double().mean())
    assert run.summary()["unseen"]["personal"]["accuracy"] == pytest.approx(accuracy)
    assert run.scores.tables()["personal"][3, 3] == pytest.approx(accuracy)


def test_they_are_scored_at_the_end_of_a_run_also_if_it_is_resumed_or_made_longer(
    algorithm: Algorithm, tmp_path: Path
) -> None:
    federation, clients = held_out("client-2"), tmp_path / "short" / "clients.csv"
    simulation(algorithm, federation, folder=tmp_path / "long", rounds=3).run()
    short = simulation(algorithm, federation, folder=tmp_path / "short", rounds=1, checkpoint_every=1)
    short.run()
    assert short.summary()["unseen"]["clients"] == 1
    assert "unseen" in clients.read_text().splitlines()[0]
    rows = clients.read_text().splitlines()[1:]
    assert [row.split(",")[1] for row in rows] == ["false", "false", "true", "false", "false", "false"]
    options = {"folder": tmp_path / "short", "checkpoint_every": 1, "new": False}
    again = simulation(algorithm, federation, rounds=1, **options)
    again.resume()
    assert again.summary()["unseen"] == short.summary()["unseen"]
    again.close()
    more = simulation(algorithm, federation, rounds=3, **options)
    more.resume()
    more.advance()
    assert "unseen" not in more.summary()  # what was scored after round 1 says nothing of round 2
    more.run()
    for file in ("metrics.jsonl", "clients.csv"):
        assert (tmp_path / "short" / file).read_bytes() == (tmp_path / "long" / file).read_bytes()


@pytest.mark.parametrize("kind", [equipoise.FedAvg, equipoise.Ditto])
def test_without_statistics_of_its_own_it_gets_no_global_model(kind: type) -> None:
    """BatchNorm: who never trained has seen no mean and no variance, so only its adapted model can be scored."""
    module = BodyAndHead(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU()), nn.Linear(7, 3))
    run = simulation(kind(lr=0.05, epochs=2, batch=100, buffers="local"), held_out("client-3"), module)
    run.run()
    assert set(run.summary()["unseen"]) == {"clients", "adaptation_samples", "personal"}
    assert "global" in run.summary()
    result = equipoise.api.Result(run)
    model = result.personal_vector("client-3")
    assert not torch.equal(model.buffers, run.task.buffers)
    with pytest.raises(EquipoiseError, match="took no part in training and has no buffers"):
        result.global_model("client-3")
    result.global_model("client-2")


def test_train_holds_clients_out(tmp_path: Path) -> None:
    clients = [{"train": (np.random.default_rng(i).normal(size=(8, 5)), np.arange(8) % 3)} for i in range(10)]
    for client in clients:
        client["test"] = client["train"]
    result = equipoise.train(small_mlp(), clients, equipoise.FedAvg(), rounds=2, unseen=0.2, out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["clients"] == 8
    assert summary["unseen"]["clients"] == 2
    assert set(summary["unseen"]) >= {"personal", "global"}
    assert "personal" not in summary  # FedAvg's training clients have no model of their own
    assert result.scores()["personal"].shape == (10, 4)
    assert np.isfinite(result.scores()["personal"][:, 3]).sum() == 2
    with pytest.raises(EquipoiseError, match=r"unseen = 1\.5"):
        equipoise.train(small_mlp(), clients, equipoise.FedAvg(), unseen=1.5)
    with pytest.raises(EquipoiseError, match="unseen = 'a few' is not allowed"):
        equipoise.train(small_mlp(), clients, equipoise.FedAvg(), unseen="a few")  # type: ignore[arg-type]
    with pytest.raises(EquipoiseError, match="all clients are unseen"):
        equipoise.train(small_mlp(), clients, equipoise.FedAvg(), unseen=0.99)


def test_a_run_does_not_go_on_with_others_held_out(tmp_path: Path) -> None:
    algorithm = equipoise.FedAvg(lr=0.05, batch=4)
    simulation(algorithm, held_out("client-2"), folder=tmp_path / "a", rounds=2).run()
    other = simulation(algorithm, held_out("client-3"), folder=tmp_path / "a", rounds=4, new=False)
    with pytest.raises(EquipoiseError, match="clients that are kept out of training differ"):
        other.resume()
    other.close()
    assert other.start.clients == 5  # an algorithm is told of those who train


def test_who_is_held_out_depends_on_the_seed_and_the_names() -> None:
    federation = classification()
    one, again, other = (federation.holding_out(0.5, seed).unseen for seed in (0, 0, 1))
    assert one == again
    assert len(one) == 3
    assert one != other
    assert federation.holding_out(0.01, 0).unseen <= set(federation.names)
    assert len(federation.holding_out(0.01, 0).unseen) == 1


def test_with_averaged_statistics_it_gets_the_global_model_too() -> None:
    module = BodyAndHead(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU()), nn.Linear(7, 3))
    run = simulation(equipoise.FedAvg(lr=0.05, epochs=2, batch=100), held_out("client-3"), module)
    run.run()
    assert {"personal", "global"} <= run.summary()["unseen"].keys()
    result = equipoise.api.Result(run)
    one, two = (result.global_model(client).state_dict() for client in ("client-3", "client-2"))
    assert all(torch.equal(one[name], two[name]) for name in one)
