"""Differential privacy of uploads: they are clipped to a norm, and Gaussian noise is added."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from equipoise import randomness
from equipoise.errors import EquipoiseError
from equipoise.privacy.accounting import ReleaseCount, classical_epsilon, classical_noise
from equipoise.settings import MOST, NonNegative, Positive, Settings
from equipoise.state import State, Upload, Uploads
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
        largest = max((float(t.abs().max()) for t in message.values() if t.numel()), default=0.0)
        if largest == 0:
            return message
        # Squares of huge numbers overflow, those of tiny ones vanish: lengths are taken in units of the largest.
        units = sum(float((widened(t) / largest).square().sum()) for t in message.values()) ** 0.5
        if units * largest <= self.norm:
            return message
        # Rounding must not make it longer than it may be.
        slack = 1 - 2 * max(torch.finfo(t.dtype).eps for t in message.values())
        return State({k: (widened(t) / largest * (self.norm / units * slack)).to(t.dtype) for k, t in message.items()})


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


class Privacy(Settings):
    """Differential privacy of clients: the difference of a message from what the server knows is clipped and noised.

    All clients have the same weight, because their numbers of samples would not be covered.
    """

    clip: Positive
    "norm to which a message is clipped (C)"
    sigma: NonNegative | None = None
    "standard deviation of the noise on every number of a message or, if central, of the sum of messages"
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

    def model_post_init(self, _: object) -> None:
        if (self.sigma is None) == (self.target_epsilon is None):
            raise EquipoiseError("privacy needs either sigma, the noise, or target_epsilon, from which it is computed")
        if self.rule == "classical" and self.target_epsilon is not None:
            if self.per == "run":
                raise EquipoiseError(
                    "privacy.rule = 'classical' is a rule for one message; say privacy.per = 'release'"
                )
            if self.target_epsilon >= 1:
                raise EquipoiseError("privacy.rule = 'classical' holds for target_epsilon < 1; use 'exact'")

    @property
    def central(self) -> bool:
        return self.where == "central"

    def noise(self, releases: ReleaseCount) -> float:
        """Return the standard deviation of the noise for these releases."""
        if self.sigma is not None:
            return self.sigma
        assert self.target_epsilon is not None
        if self.rule == "classical":
            return 2 * self.clip * classical_noise(self.target_epsilon, self.delta)
        of = releases if self.per == "run" else ReleaseCount(1)
        return 2 * self.clip * of.noise(self.target_epsilon, self.delta)

    def clipped(self, message: State, reference: State) -> State:
        """Return the difference of a message from what the server knows already, clipped: what is released of it."""
        return clip(self.clip)(State({k: t - reference[k] if k in reference else t for k, t in message.items()}))

    def release(self, upload: Upload, reference: State, sigma: float, noise: Noise) -> Upload:
        """Return what leaves the client: its message with the difference from `reference` clipped and noised.

        Args:
            upload: the client's upload.
            reference: what the server knows already.
            sigma: standard deviation of the noise.
            noise: source of the noise.
        """
        new = self.clipped(upload.message, reference)
        if not self.central:
            new = gaussian(sigma)(new, noise)
        return Upload(State({k: reference[k] + t if k in reference else t for k, t in new.items()}))

    def guarantee(self, sigma: float, releases: ReleaseCount) -> dict[str, Any]:
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


@dataclass(frozen=True)
class NoisedMeanUploads(Uploads):
    """Uploads of which nothing can be seen but their noised mean."""

    who: tuple[int, ...]
    noised: State
    algorithm: str
    "name of the algorithm, for the error message"

    @staticmethod
    def of(uploads: Uploads, noise: State, count: int, algorithm: str) -> "NoisedMeanUploads":
        """Add noise to the sum of uploads.

        Args:
            uploads: the uploads.
            noise: noise on their sum.
            count: number of messages in their mean.
            algorithm: name of the algorithm.
        """
        noised = {k: (t + noise[k] / count).to(t.dtype) for k, t in uploads.mean().items()}
        return NoisedMeanUploads(uploads.who, State(noised), algorithm)

    def __len__(self) -> int:
        return len(self.who)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        raise self._private()

    @property
    def like(self) -> State:
        return self.noised

    @property
    def weighted(self) -> bool:
        return False

    def mean(self) -> State:
        return self.noised

    def weights(self) -> Tensor:
        raise self._private()

    def columns(self, name: str, low: int, high: int) -> Tensor:
        raise self._private()

    def weighing(self, weights: Tensor) -> Uploads:
        raise self._private()

    def only(self, *names: str) -> "NoisedMeanUploads":
        return NoisedMeanUploads(self.who, State({k: self.noised[k] for k in names}), self.algorithm)

    def _private(self) -> EquipoiseError:
        return EquipoiseError(
            f"{self.algorithm} looks at single messages, which noise on their sum does not cover; "
            "use privacy.where = 'local'"
        )
