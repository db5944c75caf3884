"""Poisoned data, on which malicious clients train, and the samples on which an attack's success is measured."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from equipoise import randomness
from equipoise.attacks.base import Attack, PoisonContext, SuccessMeasure
from equipoise.data.federation import Federation, RaggedIndices
from equipoise.errors import EquipoiseError


def places(malicious: Collection[str]) -> dict[str, int]:
    """Return the place of each malicious client in the order of their names."""
    return {name: place for place, name in enumerate(sorted(malicious))}


def poison_samples(federation: Federation, attack: Attack, malicious: Mapping[str, int], seed: int) -> Federation:
    """Return the federation with the poisoned training samples of its malicious clients.

    Args:
        federation: the federation; its validation and test samples are kept.
        attack: the attack that changes samples.
        malicious: the names of the malicious clients, with their places among all of them.
        seed: the seed of the run.
    """
    y, inputs = federation.y.clone(), {}
    for who, name in enumerate(federation.names):
        if name not in malicious or not len(federation.train[who]):
            continue
        rows = torch.from_numpy(federation.train[who])
        rng = randomness.torch_generator(seed, "poison", name)
        x = federation.inputs(rows)
        context = PoisonContext(federation.classes, rng, malicious[name], federation.normalize)
        poisoned, y[rows] = attack.samples(x, y[rows], context)
        if poisoned is not x:
            inputs[who] = rows, poisoned
    federation = replace(federation, y=y)
    if not inputs:
        return federation
    stored = federation.unpacked.x.clone()
    for rows, poisoned in inputs.values():
        if poisoned.shape[1:] != federation.inputs(rows[:1]).shape[1:]:
            raise EquipoiseError(f"{type(attack).__name__}.samples returned inputs of another shape")
        stored[rows] = (poisoned.permute(0, 2, 3, 1) if federation.channels_last else poisoned).to(stored)
    return replace(federation, x=stored, pixels=None).packed()


def prepared_attack(federation: Federation, attack: Attack, malicious: Collection[str]) -> Attack:
    """Return the attack with what it needs of the malicious clients' training samples, if it pools them.

    Args:
        federation: the clients and their data.
        attack: the attack.
        malicious: the names of the malicious clients.
    """
    if not (attack.pools and malicious):
        return attack
    train = dict(zip(federation.names, (federation.train[who] for who in range(len(federation))), strict=True))
    rows = torch.from_numpy(np.concatenate([train[name] for name in sorted(malicious)]))
    return attack.prepared(federation.inputs(rows), federation.y[rows])


class TriggeredSamples:
    """The test samples on which an attack's success is measured, with and without the trigger."""

    def __init__(self, federation: Federation, measure: SuccessMeasure):
        """Choose the samples.

        Args:
            federation: the clients and their data.
            measure: how success is measured.
        """
        if federation.classes is None or federation.y.ndim != 1:
            raise EquipoiseError(
                "the success of this attack is measured on labels, and these data have no single label per sample"
            )
        for what, label in (("target", measure.target), ("source", measure.source)):
            if label is not None and label >= federation.classes:
                raise EquipoiseError(
                    f"attack.{what} = {label} is not a label of these data; they have {federation.classes} classes, "
                    "numbered from 0"
                )
        self.federation, self.measure = federation, measure
        tests = [federation.test[who] for who in range(len(federation))]
        self.rows = RaggedIndices([rows[self._concerned(torch.from_numpy(rows))] for rows in tests])
        self.measure.trigger(federation.inputs(torch.zeros(0, dtype=torch.int64)), federation.normalize)

    def _concerned(self, rows: Tensor) -> np.ndarray:
        x = self.federation.inputs(rows) if self.measure.among is not None else rows
        mask: np.ndarray = self.measure.concerned(x, self.federation.y[rows]).numpy()
        return mask

    def __getitem__(self, who: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a client's samples: inputs, inputs with the trigger, and labels."""
        rows = torch.from_numpy(self.rows[who])
        x = self.federation.inputs(rows)
        return x, self.measure.trigger(x, self.federation.normalize), self.federation.targets(rows)
