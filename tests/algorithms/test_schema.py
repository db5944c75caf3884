"""Mistakes in an algorithm of one's own are told in a sentence, before the first round."""

import pytest

import equipoise as eq
from equipoise.algorithms import FedAvg
from equipoise.algorithms.local_data import LocalData
from equipoise.errors import EquipoiseError
from equipoise.state import State, Upload
from tests.support.problems import simulation


class Misspelt(FedAvg):
    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        return client, Upload(State(w=data.desend(down.w)))  # type: ignore[attr-defined]


class Half(FedAvg):
    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        return Upload(State(w=data.descend(down.w)))  # type: ignore[return-value]


class Growing(FedAvg):
    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        return State(v=down.w), Upload(State(w=down.w))


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (Misspelt(), r"Misspelt.local_update fails: AttributeError: data has no 'desend'; did you mean 'descend'"),
        (Half(), r"Half.local_update must return the client's next State and an Upload, as a pair"),
        (Growing(), r"Growing.local_update changes the fields or shapes of the client's state"),
    ],
)
def test_a_mistake_is_told_before_the_first_round(algorithm: FedAvg, sentence: str) -> None:
    with pytest.raises(EquipoiseError, match=sentence):
        simulation(algorithm)


def test_momentum_belongs_to_sgd() -> None:
    with pytest.raises(EquipoiseError, match=r"momentum = 0.9 has no effect with algorithm.optimizer = 'adamw'"):
        eq.FedAvg(optimizer="adamw", momentum=0.9)


def test_a_hook_that_is_none_is_refused() -> None:
    with pytest.raises(EquipoiseError, match=r"on_epoch_end is no hook of a callback; did you mean 'on_round_end'"):

        class Mine(eq.Callback):
            def on_epoch_end(self, line: object) -> None: ...
