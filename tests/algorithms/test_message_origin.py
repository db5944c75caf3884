"""The origin of an algorithm's messages: what a client would send if it had learned nothing."""

import pytest
import torch

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm, origin_of
from equipoise.algorithms.schema import ShapeProbe
from equipoise.state import State
from tests.support.problems import EVERY, registered, simulation

WITHOUT = {
    "fedamp",
    "fedcac",
    "fedcr",
    "fedfomo",
    "fednova",
    "fedpac",
    "fedproto",
    "least-squares",
    "pfedfda",
    "shared-least-squares",
    *(k for k in EVERY if k.startswith("learn2pfed")),
}
"""Their messages hold statistics of samples or something else in every exchange, or begin at the client's own model."""


def first_message(algorithm: Algorithm) -> tuple[State, State]:
    """The server's state before the first round, and the message of a client that trains nothing."""
    run = simulation(algorithm)
    start = run.start
    server = algorithm.init_server(start)
    down = algorithm.broadcast(server, 0)
    _, upload = algorithm.local_update(algorithm.init_client(start), down, ShapeProbe(start))
    return server, upload.message


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in WITHOUT])
def test_a_client_that_trains_nothing_sends_the_origin(name: str) -> None:
    algorithm = registered(name)
    server, message = first_message(algorithm)
    origin = origin_of(algorithm, server, message)
    assert origin is not None
    assert set(message) - set(origin) <= {"F"}  # a loss has no origin
    for field, t in origin.items():
        torch.testing.assert_close(t, message[field], rtol=1e-12, atol=1e-12)


def test_a_change_of_a_variate_has_the_origin_zero_whatever_the_servers_variate_is() -> None:
    algorithm = registered("scaffold")
    server, message = first_message(algorithm)
    origin = origin_of(algorithm, State(server, c=torch.ones_like(server.c)), message)
    assert origin is not None
    assert not origin.c.any()


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_statistics_have_no_origin(name: str) -> None:
    algorithm = registered(name)
    server, message = first_message(algorithm)
    assert origin_of(algorithm, server, message) is None


def test_the_origin_follows_the_server() -> None:
    """Later, too, it is what the server sends down: here of FedAvg, whose clients begin there."""
    run = simulation(registered("fedavg"), rounds=2)
    run.run()
    origin = origin_of(run.algorithm, run.server, State(w=run.server.w))
    assert origin is not None
    assert torch.equal(origin.w, run.algorithm.broadcast(run.server, 3).w)
