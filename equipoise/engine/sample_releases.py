"""What a run releases of single samples, with noise on the gradients of local training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.privacy.mechanisms import Privacy
from equipoise.training.sample_privacy import SamplePrivacy


@dataclass(frozen=True)
class SampleLevelReleases:
    """The releases of all clients, with what their own numbers of samples make of them."""

    privacy: SamplePrivacy
    sizes: Mapping[str, int]
    "number of training samples of each client by name, those of clients that only adapt the result included"
    trained: Mapping[str, int]
    "number of rounds that each client has trained in; a client that is not named has trained in none"

    def sigma(self, privacy: Privacy) -> float:
        """Return the largest standard deviation of the noise that any client needs."""
        return max((self.privacy.sigma(name, n) for name, n in self.sizes.items()), default=0.0)

    def guarantee(self, privacy: Privacy, sigma: float) -> dict[str, Any]:
        """Return the guarantee for summary.json: that of the client with the least privacy; None means infinity."""
        run = release = 0.0
        steps = 0
        for name, n in self.sizes.items():  # clients with the same steps are computed once
            rounds, z = self.trained.get(name, 0), self.privacy.sigma(name, n) / privacy.clip
            whole = self.privacy.whole(n, rounds)
            run = max(run, whole.epsilon(z, privacy.delta))
            release = max(release, self.privacy.message(n).epsilon(z, privacy.delta) if rounds else 0.0)
            steps = max(steps, whole.gaussians)
        return {
            "unit": privacy.unit,
            "where": privacy.where,
            "batches": privacy.batches,
            "clip": privacy.clip,
            "sigma": sigma,
            "delta": privacy.delta,
            "epsilon_release": _finite(release),
            "epsilon_classical": None,
            "epsilon_run": _finite(run),
            "releases": max(self.trained.values(), default=0),
            "steps": steps,
        }


@dataclass(frozen=True)
class UnknownSampleReleases:
    """What a server knows of the releases of samples: not how many samples clients have."""

    releases: int
    "largest number of messages of a client"

    def sigma(self, privacy: Privacy) -> float:
        """Return the noise that the settings give; clients find what they need for a target themselves."""
        return privacy.sigma or 0.0

    def guarantee(self, privacy: Privacy, sigma: float) -> dict[str, Any]:
        """Return the guarantee for summary.json: the target that every client keeps; without one it is not known."""
        return {
            "unit": privacy.unit,
            "where": privacy.where,
            "batches": privacy.batches,
            "clip": privacy.clip,
            "sigma": None if privacy.sigma is None else sigma,
            "delta": privacy.delta,
            "epsilon_release": None,
            "epsilon_classical": None,
            "epsilon_run": privacy.target_epsilon,
            "releases": self.releases,
        }


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
