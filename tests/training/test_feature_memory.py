"""Features that a round needs several times are computed once, and only as long as nothing changes them."""

from typing import Any
from unittest import mock

import pytest
import torch

from equipoise.algorithms import Learn2pFed
from equipoise.executors import stacked_trainer, thread_trainer
from equipoise.representations.head_problem import HeadSamples
from equipoise.training.feature_memory import FeatureMemory
from tests.support.unrolled import BEGIN, LOSS, trained

HOME = {"threads": thread_trainer, "stacked": stacked_trainer}


@pytest.mark.parametrize("mode", HOME)
@pytest.mark.parametrize("network", ["alternate", "joint"])
def test_each_client_reads_once_in_a_round_and_results_are_those_without_memory(mode: Any, network: Any) -> None:
    algorithm = Learn2pFed(**BEGIN, **LOSS, network=network)
    with mock.patch.object(HOME[mode], "head_samples", side_effect=HOME[mode].head_samples) as read:
        one = trained("classification", algorithm, mode=mode, rounds=2)
    assert read.call_count == 2 * 4
    with mock.patch.object(FeatureMemory, "get", return_value=None):
        other = trained("classification", algorithm, mode=mode, rounds=2)
    assert all(torch.equal(other.server[name], t) for name, t in one.server.items())
    assert all(torch.equal(other.store.get(i)[name], t) for i in range(4) for name, t in one.store.get(i).items())


def test_another_body_or_round_is_not_remembered() -> None:
    memory, body = FeatureMemory(), torch.zeros(3)
    samples = HeadSamples(torch.ones(2, 1, requires_grad=True), torch.zeros(2, 1), 2, (), torch.Size([1]), 1)
    assert memory.get(1, 0, "train", body) is None
    memory.put(0, "train", body, samples)
    known = memory.get(1, 0, "train", torch.zeros(3))
    assert known is not None
    assert torch.equal(known.features, samples.features)
    assert not known.features.requires_grad
    for other in ((1, 0, "train", torch.ones(3)), (1, 1, "train", body), (1, 0, "validation", body)):
        assert memory.get(*other) is None
    body += 1  # what was put in is a copy
    assert memory.get(1, 0, "train", torch.zeros(3)) is not None
    assert memory.get(2, 0, "train", torch.zeros(3)) is None
    assert not memory.kept
