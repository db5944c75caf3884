"""Models with LoRA adapters, of which some parts are shared and the frozen base never moves."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from tests.support.odd_models import CLIENTS
from tests.support.problems import simulation

MODES = ("threads", "stacked")
pytestmark = pytest.mark.slow  # importing peft takes seconds


class Small(nn.Module):
    """An attention layer by hand, a normalisation with a constant beside it, and a classifier."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(1, 4), nn.Linear(1, 4)
        self.norm, self.classifier = nn.LayerNorm(4), nn.Linear(4, 3)
        self.register_buffer("position", torch.linspace(-1, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x + self.position).unsqueeze(-1)
        query, value = self.query(tokens), self.value(tokens)
        return self.classifier(self.norm((query @ query.mT).softmax(-1) @ value).mean(-2))


def adapted(features: int, **settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs peft, the extra [lora]")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"], **settings)
    return peft.get_peft_model(Small(features), config)


def test_adapters_are_the_same_stacked_and_threaded() -> None:
    runs = [simulation(eq.FedPer(lr=0.05, batch=4), module=adapted(5), head="*.lora_B.*", mode=mode) for mode in MODES]
    for run in runs:
        run.run()
    names = [entry.name for entry in runs[0].task.space.entries]
    assert ["B" if "lora_B" in name else "A" if "lora_A" in name else "" for name in names] == [
        "A",
        "A",
        "",
        "",
        "B",
        "B",
    ]
    torch.testing.assert_close(runs[0].server.w_b, runs[1].server.w_b, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(runs[0].store.get(2).w_p, runs[1].store.get(2).w_p, rtol=1e-9, atol=1e-11)


def test_models_with_adapters_are_trained_apart_and_reproducibly() -> None:
    given = adapted(4, lora_dropout=0.3)
    before = copy.deepcopy(given.state_dict())
    runs = [
        eq.train(given, CLIENTS, eq.FedPer(lr=0.1, batch=5), head="*.lora_B.*", rounds=2, workers=workers)
        for workers in (1, 2)
    ]
    assert runs[0].metrics == runs[1].metrics
    assert runs[0].summary["mode"] == "threads"
    assert runs[0].summary["parameters_shared"] == 2 * 2 + 15  # the two A and the classifier
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    one, other = runs[0].personal(0), runs[0].personal(1)
    for name, p in one.named_parameters():
        same = torch.equal(p, dict(other.named_parameters())[name])
        assert same == ("lora_B" not in name), name
        assert p.requires_grad == ("lora_" in name or "modules_to_save" in name)
        assert p.requires_grad or torch.equal(p, before[name])
    x = torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(one).merge_and_unload()(x), one(x), rtol=1e-4, atol=1e-5)
