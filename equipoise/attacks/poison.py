"""Poisoned data: what malicious clients train on."""

from collections.abc import Collection
from dataclasses import replace

import torch

from equipoise import randomness
from equipoise.attacks.base import Attack
from equipoise.data.federation import Federation


def poison_labels(federation: Federation, attack: Attack, malicious: Collection[str], seed: int) -> Federation:
    """The federation with the training targets that its malicious clients have; what they are scored on is left."""
    y = federation.y.clone()
    for who, name in enumerate(federation.names):
        if name in malicious:
            rows = torch.from_numpy(federation.train[who])
            y[rows] = attack.labels(y[rows], federation.classes, randomness.torch_generator(seed, "poison", name))
    return replace(federation, y=y)
