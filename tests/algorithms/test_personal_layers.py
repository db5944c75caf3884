"""LG-FedAvg and FedBN: which parts of a model stay with the client."""

from typing import Any

import pytest
import torch
from torch import nn

from equipoise.algorithms import FedAvg, FedBN, FedPer, LGFedAvg, Local
from equipoise.api import Result
from equipoise.data.federation import from_clients
from equipoise.engine.simulation import Simulation
from equipoise.models.base import BodyAndHead
from tests.algorithms.test_partial_sharing import normalised
from tests.support.problems import FULL, classification, simulation

COMMON: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch": 4}


def finished(algorithm: Any, *given: Any, **options: Any) -> Simulation:
    run = simulation(algorithm, *given, **{"rounds": 2, **options})
    run.run()
    return run


def test_lg_fedavg_without_a_head_is_local() -> None:
    lg, local = (finished(a(**COMMON), head=None) for a in (LGFedAvg, Local))
    assert all(torch.equal(lg.store.get(i).w_l, local.store.get(i).v) for i in range(6))


def test_lg_fedavg_sends_what_fedper_keeps() -> None:
    lg, per, whole = (finished(a(**COMMON)).schema.parameters_shared for a in (LGFedAvg, FedPer, FedAvg))
    assert lg + per == whole
    assert 0 < lg < whole


def test_lg_fedavg_says_that_without_a_head_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulation(LGFedAvg(**COMMON), head=None)
    told: list[str] = []
    monkeypatch.setattr(run, "warn", told.append)
    run.warn_about_traps()
    assert "nothing of the model is shared" in told[0]
    run.close()


def test_fedbn_of_nothing_but_normalisation_is_local() -> None:
    module = BodyAndHead(nn.BatchNorm1d(5), nn.Identity())
    bn, local = (finished(a(**COMMON), None, module, head=None) for a in (FedBN, Local))
    assert bn.server.w.numel() == 0
    assert all(torch.equal(bn.store.get(i).b, local.store.get(i).v) for i in range(6))


def test_fedbn_of_equal_clients_with_full_batches_is_fedavg() -> None:
    x, y = (t.numpy() for t in classification().gather(torch.arange(20)))
    equal = from_clients([{"train": (x, y), "test": (x, y)}] * 3)
    module = normalised()
    bn, avg = (finished(a(lr=0.1, batch=FULL), equal, module, participation=1.0) for a in (FedBN, FedAvg))
    ours, theirs = Result(bn).personal(1).state_dict(), Result(avg).global_model().state_dict()
    for name, value in theirs.items():
        if not name.endswith("num_batches_tracked"):  # which is never averaged
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_fedbn_keeps_normalisation_by_the_kind_of_layer_and_its_statistics() -> None:
    layers = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.LayerNorm(6))  # no telling names
    for kind, kept in (("batch", {"1"}), ("norm", {"1", "3"})):
        run = finished(FedBN(**COMMON, layers=kind), None, BodyAndHead(layers, nn.Linear(6, 3)), participation=1.0)
        own = run.algorithm._own(run.task.space)
        names = {e.name for e in run.task.space.entries if own[e.offset]}
        assert names == {f"body.{layer}.{what}" for layer in kept for what in ("weight", "bias")}
        assert run.schema.up["w"][0] == run.schema.down["w"][0] == (run.task.space.size - 12 * len(kept),)
        assert "buffers" not in run.schema.up
        one, two = (run.store.get(i) for i in (4, 5))
        assert not torch.equal(one.b, two.b)
        assert not torch.equal(one.buffers, two.buffers)


def test_a_newcomer_to_fedbn_adapts_normalisation_only() -> None:
    run = simulation(FedBN(**COMMON), classification().holding_out(0.2, 0), normalised(), rounds=2)
    run.run()
    [name] = run.federation.unseen
    vector, own = Result(run).personal_vector(name).vector, run.algorithm._own(run.task.space)
    assert torch.equal(vector[~own], run.server.w)
    assert not torch.equal(vector[own], run.start.w0[own])
