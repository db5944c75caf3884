"""Poisoned data, on which malicious clients train."""

from collections.abc import Collection
from dataclasses import replace

import torch

from equipoise import randomness
from equipoise.attacks.base import Attack
from equipoise.data.federation import Federation


def poison_labels(federation: Federation, attack: Attack, malicious: Collection[str], seed: int) -> Federation:
    """Return the federation with the poisoned training targets of its malicious clients.

    Args:
        federation: the federation; its validation and test targets are kept.
        attack: the attack that changes the targets.
        malicious: the names of the malicious clients.
        seed: the seed of the run.
    """
    y = federation.y.clone()
    for who, name in enumerate(federation.names):
        if name in malicious:
            rows = torch.from_numpy(federation.train[who])
            y[rows] = attack.labels(y[rows], federation.classes, randomness.torch_generator(seed, "poison", name))
    return replace(federation, y=y)
