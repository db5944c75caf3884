"""Sample-level differential privacy of local training: noisy sums of clipped gradients (DP-SGD), and their accounting.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Alg. 1, inside every client. Everything that a client
computes from its samples passes through these sums, so what it sends, what it keeps and the models that it predicts
with are all private; only scores are not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import Start
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import Part
from equipoise.privacy.mechanisms import Noise, Privacy, seeded_noise
from equipoise.privacy.sample_accounting import NoisedStep, SampleReleases
from equipoise.representations.terms import LossTerm
from equipoise.torch_device import wide_dtype
from equipoise.training.batches import Batch, steps_in_epoch
from equipoise.training.data_use import DataUse, Pass
from equipoise.training.sample_gradients import SampleGradients, check_sample_gradients
from equipoise.training.task import Task

NoiseSource = Callable[[str, int, str, int], Noise]
"""Returns the noise of an operation on a client's samples: given the purpose, the round, the client's name, and the
number of the operation in the round."""


def seeded_source(seed: int) -> NoiseSource:
    """Return the noise of a simulation, which is the same in every run."""
    return lambda purpose, round, name, number: seeded_noise(seed, "samples", purpose, round, name, number)


@dataclass(frozen=True)
class SamplePrivacy:
    """How a run's local training is made private, and what it releases of a sample."""

    settings: Privacy
    algorithm: Algorithm
    use: DataUse
    source: NoiseSource
    rounds: Mapping[str, int] | int
    "number of rounds that each client trains in; a client that is not named trains in none"

    @staticmethod
    def of(
        settings: Privacy, task: Task, algorithm: Algorithm, start: Start, rounds: Mapping[str, int] | int
    ) -> "SamplePrivacy":
        """Check that the model and the algorithm can be trained privately, and return how.

        Args:
            settings: the section [privacy], with unit = "sample".
            task: the task.
            algorithm: the algorithm.
            start: what is known before the first round.
            rounds: number of rounds that each client trains in.
        """
        check_sample_gradients(task)
        return SamplePrivacy(settings, algorithm, DataUse.of(algorithm, start), seeded_source(start.seed), rounds)

    def with_source(self, source: NoiseSource) -> "SamplePrivacy":
        """Return the same with another source of noise."""
        return replace(self, source=source)

    def rounds_of(self, name: str) -> int:
        """Return the number of rounds that a client trains in."""
        return self.rounds if isinstance(self.rounds, int) else self.rounds.get(name, 0)

    def message(self, samples: int) -> SampleReleases:
        """Return the steps of one round of a client with so many samples."""
        return self._steps(self.use.update, samples)

    def whole(self, samples: int, rounds: int) -> SampleReleases:
        """Return the steps of a run, with those that make a client's model after it.

        Args:
            samples: number of training samples of the client.
            rounds: number of rounds that it trains in; 0 if it only adapts the result.
        """
        after = self.use.personal if rounds else self.use.adapted
        return self.message(samples).times(rounds) + self._steps(after, samples)

    def sigma(self, name: str, samples: int) -> float:
        """Return the standard deviation of the noise on a client's sums of clipped gradients."""
        if self.settings.sigma is not None:
            return self.settings.sigma
        assert self.settings.target_epsilon is not None
        whole = self.whole(samples, self.rounds_of(name))
        return self.settings.clip * whole.noise(self.settings.target_epsilon, self.settings.delta)

    def in_epoch(self, samples: int) -> int:
        """Return the number of steps in a pass over so many samples."""
        batch = self.algorithm.batch
        return max(1, steps_in_epoch(samples, batch, batch if self.algorithm.drop_last else 1))

    def rate(self, samples: int) -> float:
        """Return the probability with which a sample is in a batch of Poisson sampling: one pass in expectation."""
        return 1 / self.in_epoch(samples)

    def _steps(self, passes: Sequence[Pass], samples: int) -> SampleReleases:
        total = SampleReleases()
        for each in passes if samples else ():
            in_epoch = self.in_epoch(samples)
            count = each.epochs * in_epoch if each.steps is None else each.steps
            if each.whole:
                step, count = NoisedStep(1.0), 1
            elif self.settings.batches == "poisson":
                step = NoisedStep(self.rate(samples), each.repeat)
            else:  # a sample is in one batch of an epoch, and which one depends on no data
                step, count = NoisedStep(1.0, each.repeat), -(-count // in_epoch)
            total = total + SampleReleases({step: count})
        return total


class PrivateSteps:
    """The gradients of one trainer's steps, as they are used under sample-level privacy."""

    def __init__(
        self,
        privacy: SamplePrivacy,
        gradients: SampleGradients,
        names: Sequence[str],
        sizes: Sequence[int],
        round: int,
        purpose: str,
    ):
        """Prepare for the clients of a trainer.

        Args:
            privacy: how training is made private.
            gradients: computes sums of clipped gradients.
            names: names of the clients.
            sizes: their numbers of training samples.
            round: number of the round.
            purpose: what the training is for.
        """
        self.privacy, self.gradients, self.names, self.sizes = privacy, gradients, names, sizes
        self.round, self.purpose = round, purpose
        self.poisson = privacy.settings.batches == "poisson"
        self.sigmas = [privacy.sigma(name, n) for name, n in zip(names, sizes, strict=True)]
        self.operations = 0
        "number of operations on the samples so far"
        self.noise: list[Noise] = []
        "source of the noise of the current operation, for each client"

    def begin(self) -> None:
        """Begin another operation on the samples, which has its own noise and its own batches.

        Batches drawn twice would make two steps depend on one draw, and sampling would hide less than is accounted.
        """
        self.noise = [self.privacy.source(self.purpose, self.round, name, self.operations) for name in self.names]
        self.operations += 1

    def batch_indices(self, position: int, epochs: int, steps: int | None) -> np.ndarray:
        """Draw batches by Poisson sampling, every sample by itself; see `training.batches.batch_indices`.

        The draws come from the noise, so that in a deployment nobody can predict them.
        """
        n = self.sizes[position]
        threshold = ndtri(self.privacy.rate(n))  # a normal number is below it with this probability
        count = epochs * self.privacy.in_epoch(n) if steps is None else steps
        drawn = [np.flatnonzero(self.noise[position]((n,)).numpy() < threshold) for _ in range(count)]
        order = np.full((count, max(1, max(map(len, drawn), default=1))), -1, dtype=np.int64)
        for row, chosen in zip(order, drawn, strict=True):
            row[: len(chosen)] = chosen
        return order

    def expected_samples(self, position: int, plan: np.ndarray) -> int:
        """Return the number of samples of a plan as it is reported: expected, because what was drawn is a secret."""
        n = self.sizes[position]
        return round(len(plan) * n * self.privacy.rate(n)) if self.poisson else int((plan >= 0).sum())

    def clipped_sum(
        self,
        v: Tensor,
        batch: Batch,
        part: Part = "all",
        mask: Tensor | None = None,
        term: LossTerm | None = None,
        term_only: bool = False,
    ) -> Tensor:
        """Return the sum of the batch's clipped gradients, without noise, of shape (P,) or (cohort, P).

        A batch may contain only the first clients of a stack.
        """
        if v.ndim == 1:
            counts = torch.ones(len(batch.x), device=v.device)
        else:
            assert batch.weights is not None
            v, counts = v[: len(batch.x)], batch.weights > 0
        if mask is not None and mask.ndim > 1:
            mask = mask[: len(batch.x)]
        clip = self.privacy.settings.clip
        return self.gradients.clipped_sum(v, batch.x, batch.y, counts, clip, part, mask, term, term_only)

    def noised(self, total: Tensor, waiting: Sequence[int] = ()) -> Tensor:
        """Add noise to a sum of clipped gradients; clients that are done and wait for others draw none."""
        if not any(self.sigmas):
            return total
        rows = total.unsqueeze(0) if total.ndim == 1 else total
        noise = torch.zeros(rows.shape, dtype=torch.float64)
        for k, row in enumerate(noise):
            if k not in waiting and self.sigmas[k]:
                row.copy_(self.sigmas[k] * self.noise[k]((len(row),)))
        noise = noise.to(wide_dtype(total.device)).to(total.device).view(total.shape)
        return (total + noise).to(total.dtype)

    def batch_sizes(self, batch: Batch, like: Tensor) -> Tensor:
        """Return by what the sum of a batch is divided, for each client: the expected size of the batch.

        The size of a shuffled batch depends on no data, so that it is used as it is.
        """
        if self.poisson:
            sizes = [n * self.privacy.rate(n) for n in self.sizes]
            return like.new_tensor(sizes[: len(like)] if like.ndim > 1 else sizes).reshape(-1, *[1] * (like.ndim - 1))
        if like.ndim == 1:
            return like.new_tensor([len(batch.x)])
        assert batch.weights is not None
        return (batch.weights > 0).sum(1, keepdim=True).clamp(min=1).to(like.dtype)


def check_engine(privacy: Privacy | None, compiled: bool) -> None:
    """Raise an error for an engine setting that private training would ignore."""
    if privacy is not None and privacy.unit == "sample" and compiled:
        raise EquipoiseError(
            "engine.compile = true has no effect with privacy.unit = 'sample', whose gradients are not compiled; leave "
            "it out"
        )
