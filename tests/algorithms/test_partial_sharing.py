"""Heads that are parameters from all over the network, and masks by name."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.algorithms.schema import infer_schema
from equipoise.models.base import BodyAndHead
from equipoise.state import State, Upload, Uploads
from tests.support.marks import slow_except
from tests.support.problems import registered, simulation, small_mlp

WITH_HEAD = [name for name in ALGORITHMS if registered(name).requires.head]
ONE_SUBMODULE = ["feature-decay", "fedpac", "fedreco", "knn-per", "learn2pfed", "fedproto", "moon", "fedrod", "pfedfda"]
ONE_SUBMODULE += ["least-squares", "shared-least-squares", "fedas", "feddbe", "gpfl", "fedcp"]
SCATTERED = [name for name in WITH_HEAD if name not in ONE_SUBMODULE]


def test_who_needs_one_submodule_as_head_declares_it() -> None:
    for name in WITH_HEAD:
        requires = registered(name).requires
        assert (requires.head_module or requires.linear_head) == (name in ONE_SUBMODULE)
    assert not eq.FedReCo(split=("body.tanh",)).requires.head_module


@pytest.mark.parametrize("name", ONE_SUBMODULE)
@pytest.mark.parametrize("head", ["*.bias", ["*.bias", "head"], nn.Linear, None])
def test_who_needs_one_submodule_as_head_refuses_others(name: str, head: object) -> None:
    with pytest.raises(eq.EquipoiseError, match=r", so (its|the) head must be one submodule") as error:
        simulation(registered(name), head=head)
    assert ("nothing" if head is None else "body.encoder.") in str(error.value).split("here it is")[1]


@pytest.mark.parametrize("name", slow_except(SCATTERED, "fedper"))
def test_a_scattered_head_is_the_same_stacked_and_threaded(name: str) -> None:
    runs = [simulation(registered(name), head=["*.bias", "head"], mode=mode) for mode in ("threads", "stacked")]
    for run in runs:
        run.run()
        assert run.counters.left_out == 0
    space = runs[0].task.space
    assert [e.name for e in space.entries] == ["body.encoder.weight", "body.encoder.bias", "head.weight", "head.bias"]
    for field, tensor in runs[0].server.items():
        torch.testing.assert_close(tensor, runs[1].server[field], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", slow_except(SCATTERED, "fedrep"))
def test_a_pattern_for_the_head_is_the_head(name: str) -> None:
    runs = [simulation(registered(name), head=head, rounds=2) for head in ("head", "he*", ["head.bias", "*d.weight"])]
    for run in runs:
        run.run()
    for other in runs[1:]:
        assert other.fingerprint == runs[0].fingerprint
        assert other.lines == runs[0].lines


def normalised() -> nn.Module:
    layers = OrderedDict(fc1=nn.Linear(5, 6), bn1=nn.BatchNorm1d(6), tanh=nn.Tanh(), fc2=nn.Linear(6, 4))
    return BodyAndHead(nn.Sequential(layers | OrderedDict(bn2=nn.BatchNorm1d(4))), nn.Linear(4, 3))


@pytest.mark.parametrize("head", ["body.bn*", nn.BatchNorm1d])
def test_parameters_of_batch_normalisation_never_leave_the_client(head: object) -> None:
    run = simulation(eq.FedPer(lr=0.1, batch=5), module=normalised(), head=head, participation=1.0)
    run.run()
    space = run.task.space
    kept = {entry.name for entry in space.entries if entry.offset >= space.body_size}
    assert kept == {"body.bn1.weight", "body.bn1.bias", "body.bn2.weight", "body.bn2.bias"}
    schema = infer_schema(run.algorithm, run.start)
    assert schema.up["w_b"][0] == schema.down["w_b"][0] == (space.body_size,) == (space.size - 20,)
    assert (schema.parameters_shared, schema.parameters_personal) == (space.body_size, 20)
    heads = [run.store.get(who).w_p for who in range(len(run.federation))]
    assert len({tuple(head.tolist()) for head in heads}) == len(heads)


class Masked(Algorithm):
    """FedAvg of a part of the model, the rest of which stays as it is."""

    which: str = "*.bias"

    def init_server(self, start: Start) -> State:
        return State(w=start.w0)

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        w = data.descend(down.w, part=data.space.mask(self.which))
        return client, Upload(State(w=w), reference=down, weight=data.size)

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        return reduce(uploads)

    def global_model(self, server: State) -> Tensor:
        return server.w


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}, {"optimizer": "adam"}], ids=["sgd", "momentum", "adam"])
def test_what_is_outside_a_mask_does_not_move(more: dict) -> None:
    runs = [simulation(Masked(lr=0.05, batch=4, **more), mode=mode) for mode in ("threads", "stacked")]
    for run in runs:
        run.run()
        moved = (run.server.w - run.task.w0).abs() > 1e-12  # the mean of equal numbers is rounded
        assert torch.equal(moved, run.task.space.mask("*.bias"))
    torch.testing.assert_close(runs[0].server.w, runs[1].server.w, rtol=1e-9, atol=1e-11)


def test_a_mask_of_the_body_trains_the_body() -> None:
    class ByPart(Masked):
        def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
            w = data.descend(down.w, part="body")
            return client, Upload(State(w=w), reference=down, weight=data.size)

    by_name = simulation(Masked(lr=0.05, batch=4, which="body"), module=small_mlp())
    by_part = simulation(ByPart(lr=0.05, batch=4), module=small_mlp())
    for run in (by_name, by_part):
        run.run()
    torch.testing.assert_close(by_name.server.w, by_part.server.w, rtol=1e-12, atol=1e-14)
