"""What algorithms declare of themselves is true."""

from typing import ClassVar

import pytest

from equipoise.algorithms import ALGORITHMS, FedAvg, FedAvgFT
from equipoise.algorithms import capabilities as module
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import exchanges_of, initial_upload_of
from tests.support.problems import registered, simulation

CAPABILITIES = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
TRAINING = ("init_server", "init_client", "broadcast", "local_update", "aggregate", "initial_upload", "exchanges")
DECLARED = [name for name, cls in ALGORITHMS.items() if vars(cls).get("trains_as")]


def test_every_capability_is_somebodys() -> None:
    assert len(CAPABILITIES) == 8
    for capability in CAPABILITIES:
        assert any(issubclass(cls, capability) for cls in ALGORITHMS.values()), capability


@pytest.mark.parametrize("name", DECLARED)
def test_who_trains_as_another_has_its_hooks_of_training(name: str) -> None:
    cls = ALGORITHMS[name]
    other = cls.trains_as
    assert other is not None
    for hook in TRAINING:
        assert getattr(cls, hook, None) is getattr(other, hook, None), hook
    assert cls.requires is other.requires or name == "knn-per"  # which needs a head to look samples up by


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_methods_share_a_training_only_if_they_declare_it(name: str) -> None:
    cls = ALGORITHMS[name]
    trainer = cls if name not in DECLARED else cls.trains_as
    assert trainer is not None
    assert registered(name).training_settings()["by"].endswith(f".{trainer.__name__}")


def test_a_declaration_is_not_inherited() -> None:
    class Other(FedAvgFT):
        paper: ClassVar[str] = ""

    assert FedAvgFT.trains_as is FedAvg
    assert Other().training_settings()["by"].endswith(".Other")
    assert "finetune_epochs" in Other().training_settings()
    assert "finetune_epochs" not in FedAvgFT().training_settings()


def test_most_algorithms_have_one_exchange_and_use_the_rounds_uploads(algorithm: Algorithm) -> None:
    run = simulation(algorithm)
    run.close()
    assert (exchanges_of(algorithm) > 1) == isinstance(algorithm, module.SeveralExchanges)
    if not isinstance(algorithm, module.UsesLastUploads):
        assert initial_upload_of(algorithm, run.start) is None
        assert run.pipeline.last is None
