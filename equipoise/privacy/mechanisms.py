"""Differential privacy of uploads: they are clipped to a norm, and Gaussian noise is added."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from equipoise import randomness
from equipoise.errors import EquipoiseError
from equipoise.privacy.accounting import ReleaseCount, classical_epsilon, classical_noise
from equipoise.privacy.adaptive_clip import AdaptiveClipSetting
from equipoise.settings import MOST, NonNegative, Positive, Settings
from equipoise.state import State, Upload
from equipoise.torch_device import CPU, is_accelerator, wide_dtype, widened

Noise = Callable[[Sequence[int]], Tensor]
"""Draws standard normal numbers of a shape, in float64."""


def seeded_noise(seed: int, *parts: int | str) -> Noise:
    """Return a source of noise that is the same in every run: for simulations, where nobody's data are at stake."""
    rng = randomness.generator(seed, "privacy", *parts)
    return lambda shape: torch.from_numpy(rng.standard_normal(tuple(shape)))


def secure_noise(secret: bytes = b"") -> Noise:
    """Return a source of noise that nobody can predict.

    It draws from the operating system's entropy or, with a secret, from a cryptographic stream that the secret begins.
    If the seed of a generator could be guessed, or its state computed from its output, the noise could be subtracted.
    """
    drawn = 0

    def stream(length: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return shake_256(secret + drawn.to_bytes(8, "little")).digest(length) if secret else os.urandom(length)

    def normal(shape: Sequence[int]) -> Tensor:
        count = math.prod(shape)
        half = -(-count // 2)
        whole = np.frombuffer(stream(16 * half), dtype=np.uint64).reshape(2, half)
        radius, angle = ((whole >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle  # Box and Muller
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return torch.from_numpy(both[:count].reshape(tuple(shape)))

    return normal


class Transform(ABC):
    """A transform of a message; `a >> b` applies a, then b."""

    @abstractmethod
    def __call__(self, message: State, noise: Noise) -> State: ...

    def __rshift__(self, then: "Transform") -> "Transform":
        return _Both(self, then)


@dataclass(frozen=True)
class _Both(Transform):
    first: Transform
    then: Transform

    def __call__(self, message: State, noise: Noise) -> State:
        return self.then(self.first(message, noise), noise)


@dataclass(frozen=True)
class clip(Transform):
    """Clip a message, all its fields together, to at most this Euclidean norm."""

    norm: float

    def __call__(self, message: State, noise: Noise | None = None) -> State:
        units, largest = _length(message)
        if units * largest <= self.norm:
            return message
        # Rounding must not make it longer than it may be.
        slack = 1 - 2 * max(torch.finfo(t.dtype).eps for t in message.values())
        return State({k: (widened(t) / largest * (self.norm / units * slack)).to(t.dtype) for k, t in message.items()})


def _length(message: State) -> tuple[float, float]:
    """Return a message's norm as two factors, the second of which is its largest number.

    Squares of huge numbers overflow, and those of tiny ones vanish: lengths are taken in units of the largest.
    """
    largest = max((float(t.abs().max()) for t in message.values() if t.numel()), default=0.0)
    if largest == 0:
        return 0.0, 0.0
    return sum(float((widened(t) / largest).square().sum()) for t in message.values()) ** 0.5, largest


def is_within(message: State, norm: float) -> bool:
    """Tell whether clipping to a norm leaves a message as it is."""
    units, largest = _length(message)
    return units * largest <= norm


@dataclass(frozen=True)
class gaussian(Transform):
    """Add independent normal noise of this standard deviation to every number."""

    sigma: float

    def __call__(self, message: State, noise: Noise) -> State:
        if self.sigma == 0:
            return message
        drawn = [self.sigma * noise(t.shape) for t in message.values()]
        device = next((t.device for t in message.values()), CPU)
        if is_accelerator(device):  # one copy for the whole message
            flat = torch.cat([t.flatten() for t in drawn]).to(wide_dtype(device)).to(device)
            pieces = flat.split([t.numel() for t in drawn])
            drawn = [piece.view(t.shape) for piece, t in zip(pieces, drawn, strict=True)]
        return State({k: (t + more).to(t.dtype) for (k, t), more in zip(message.items(), drawn, strict=True)})


class Releases(Protocol):
    """Messages that depend on one client, and what they reveal together."""

    @property
    def rounds(self) -> int:
        """Return the number of rounds."""
        ...

    @property
    def exchanges(self) -> int:
        """Return the number of messages in a round."""
        ...

    def epsilon(self, z: float, delta: float) -> float:
        """Return the epsilon of all messages together, with noise multiplier z."""
        ...

    def noise(self, epsilon: float, delta: float) -> float:
        """Return the noise multiplier for which all messages together have this epsilon."""
        ...


class Privacy(Settings):
    """Differential privacy of clients, whose messages are clipped and noised, or of their single samples.

    Of clients: the difference of a message from what the server knows is clipped and noised, and all clients have the
    same weight, because their numbers of samples would not be covered. Of samples: gradients are, in every step.
    """

    unwritten: ClassVar[frozenset[str]] = frozenset({"unit", "batches", "bands"})

    unit: Literal["client", "sample"] = "client"
    "what is hidden: all data of a client, by noise on messages; or one sample, by noise on the gradients of every step"
    clip: Positive
    "norm to which a message is clipped (C); with unit = sample, the gradient of every sample"
    sigma: NonNegative | None = None
    """standard deviation of the noise on every number of a message or, if central, of the sum of messages; with unit =
    sample, of the sum of a batch's clipped gradients"""
    target_epsilon: Annotated[float, Field(gt=0, le=MOST)] | None = None
    "epsilon from which the noise is computed, in place of sigma"
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    "delta of every epsilon here"
    per: Literal["run", "release"] = "run"
    "scope of target_epsilon: everything that a client sends in a run, or one message"
    rule: Literal["exact", "classical"] = "exact"
    "how the noise of one message is computed: exactly, or by the textbook's larger sqrt(2 ln(1.25 / delta)) / epsilon"
    where: Literal["local", "central"] = "local"
    "local: every client adds noise, so that nobody needs to trust the server; central: the server adds it to the sum"
    batches: Literal["poisson", "shuffled"] = "poisson"
    """with unit = sample: poisson draws every sample for every step by itself, which saves noise; shuffled are the
    ordinary batches, without that saving"""
    adaptive: AdaptiveClipSetting | None = None
    "with central noise: the clip, which begins with `clip`, follows a quantile of the lengths of messages"
    bands: Annotated[int, Field(ge=1, le=MOST)] | Literal["auto"] = 1
    """with central noise: number of rounds over which noise is correlated, so that it cancels in their sum; 1:
    independent noise; auto: the number with the least noise in the sums"""

    def model_post_init(self, _: object) -> None:
        self._check_combination()
        if (self.sigma is None) == (self.target_epsilon is None):
            raise EquipoiseError("privacy needs either sigma, the noise, or target_epsilon, from which it is computed")
        if self.rule == "classical" and self.target_epsilon is not None:
            if self.per == "run":
                raise EquipoiseError(
                    "privacy.rule = 'classical' is a rule for one message; say privacy.per = 'release'"
                )
            if self.target_epsilon >= 1:
                raise EquipoiseError("privacy.rule = 'classical' holds for target_epsilon < 1; use 'exact'")

    def _check_combination(self) -> None:
        """Raise an error for settings that do not go together."""
        if self.unit == "sample":
            own: dict[str, Any] = {"where": "local", "per": "run", "rule": "exact", "adaptive": None, "bands": 1}
            if wrong := next((name for name, value in own.items() if getattr(self, name) != value), None):
                raise EquipoiseError(
                    f"privacy.{wrong} has no effect with privacy.unit = 'sample', where every client adds noise to the "
                    "gradients of its steps; leave it out"
                )
            return
        if self.batches != "poisson":
            raise EquipoiseError("privacy.batches has no effect without privacy.unit = 'sample'; leave it out")
        for name, default in (("adaptive", None), ("bands", 1)):
            if getattr(self, name) != default and not self.central:
                raise EquipoiseError(f"privacy.{name} needs the noise of the server, privacy.where = 'central'")
        if self.adaptive is not None and self.bands != 1:
            raise EquipoiseError(
                "privacy.adaptive changes the clip, and the accounting of privacy.bands needs one clip for all rounds; "
                "use one of the two"
            )

    @property
    def of_samples(self) -> bool:
        """Tell whether it is single samples that are hidden, so that messages need no noise of their own."""
        return self.unit == "sample"

    @property
    def central(self) -> bool:
        return self.where == "central"

    def noise(self, releases: Releases) -> float:
        """Return the standard deviation of the noise for these releases of messages."""
        if self.sigma is not None:
            return self.sigma
        assert self.target_epsilon is not None
        if self.rule == "classical":
            return 2 * self.clip * classical_noise(self.target_epsilon, self.delta)
        of = releases if self.per == "run" else ReleaseCount(1)
        return 2 * self.clip * of.noise(self.target_epsilon, self.delta)

    def clipped(self, message: State, reference: State, norm: float | None = None) -> State:
        """Return the difference of a message from what the server knows already, clipped: what is released of it.

        Args:
            message: the message.
            reference: what the server knows already.
            norm: the norm to clip to; by default `clip`.
        """
        return clip(self.clip if norm is None else norm)(difference(message, reference))

    def release(
        self, upload: Upload, reference: State, sigma: float, noise: Noise, norm: float | None = None
    ) -> Upload:
        """Return what leaves the client: its message with the difference from `reference` clipped and noised.

        Args:
            upload: the client's upload.
            reference: what the server knows already.
            sigma: standard deviation of the noise.
            noise: source of the noise.
            norm: the norm to clip to; by default `clip`.
        """
        new = self.clipped(upload.message, reference, norm)
        if not self.central:
            new = gaussian(sigma)(new, noise)
        return Upload(State({k: reference[k] + t if k in reference else t for k, t in new.items()}))

    def guarantee(self, sigma: float, releases: Releases) -> dict[str, Any]:
        """Return the guarantee for summary.json; None means infinity, or that a bound does not hold."""
        z = sigma / (2 * self.clip)
        found = {
            "epsilon_release": ReleaseCount(1).epsilon(z, self.delta),
            "epsilon_classical": classical_epsilon(z, self.delta),
            "epsilon_run": releases.epsilon(z, self.delta),
        }
        return {
            "where": self.where,
            "clip": self.clip,
            "sigma": sigma,
            "delta": self.delta,
            **{k: v if v is not None and math.isfinite(v) else None for k, v in found.items()},
            "releases": releases.rounds * releases.exchanges,
        }


def difference(message: State, reference: State) -> State:
    """Return the difference of a message from what the server knows already."""
    return State({k: t - reference[k] if k in reference else t for k, t in message.items()})


def public_reference(upload: Upload, down: State) -> State:
    """Return what the server knows of a message before it arrives: only what it sent itself counts."""
    if upload.reference is None:
        return State()
    found = State()
    for name in upload.message:
        before = upload.reference.get(name)
        if before is None or not bool(before.any()):
            continue
        if not any(before.shape == t.shape and torch.equal(before, t) for t in down.values()):
            raise TypeError(
                f"the reference of {name!r} is not what the server sent, so the difference would not be private"
            )
        found[name] = before
    return found
