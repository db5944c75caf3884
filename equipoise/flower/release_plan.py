"""What an experiment releases of a client under privacy, and what the client's own settings allow."""

import json
from dataclasses import dataclass
from hashlib import blake2b

from equipoise.algorithms.capabilities import exchanges_of
from equipoise.algorithms.schema import MessageSchema
from equipoise.config.experiment import Experiment
from equipoise.privacy.accounting import ReleaseCount
from equipoise.training.sample_privacy import SamplePrivacy


@dataclass(frozen=True)
class Budget:
    """What a client's own settings allow to leave its state folder, over all experiments and runs."""

    releases: int | None = None
    "largest number of messages"
    epsilon: float | None = None
    "largest epsilon of all messages together"

    @property
    def granted(self) -> bool:
        """Tell whether the settings grant anything beyond one run of the first experiment."""
        return self.releases is not None or self.epsilon is not None


@dataclass(frozen=True)
class ReleasePlan:
    """What an experiment releases, computed by the client from its own copy of the experiment."""

    digest: str
    "digest of what determines the messages and their privacy"
    planned: int
    "number of messages in one run"
    sigma: float
    "standard deviation of the noise"
    z: float
    "noise multiplier of what the client sends; 0 if it adds no noise itself"
    delta: float
    central: bool
    local: SamplePrivacy | None = None
    "how training is made private, if it is single samples that are hidden"
    samples: int = 0
    "number of the client's training samples, if it is single samples that are hidden"

    @staticmethod
    def of(
        experiment: Experiment, schema: MessageSchema, layout: str, local: SamplePrivacy | None, name: str, samples: int
    ) -> "ReleasePlan":
        """Return the plan of an experiment with a section [privacy].

        Args:
            experiment: the experiment, as the client has it.
            schema: the shapes of its messages.
            layout: fingerprint of the layout of the model's parameters.
            local: how training is made private, if it is single samples that are hidden.
            name: name of the client.
            samples: number of its training samples, which then determines the noise.
        """
        privacy, schedule, algorithm = experiment.privacy, experiment.schedule, experiment.algorithm
        assert privacy is not None
        count = ReleaseCount(schedule.rounds, exchanges_of(algorithm))
        if local is None:
            sigma, own = privacy.noise(count), {}
            z = 0.0 if privacy.central else sigma / (2 * privacy.clip)
        else:
            sigma, own = local.sigma(name, samples), {"samples": samples}
            # As if it were known which samples are in a batch: messages of several experiments can then be added up.
            z = sigma / privacy.clip / max(1, local.message(samples).gaussians) ** 0.5
        agreed = {
            **own,
            "privacy": privacy.table(),
            "algorithm": [experiment.algorithm_name, algorithm.table()],
            "model": [experiment.model_name, experiment.model.table() if experiment.model else {}],
            "layout": layout,
            "message": {name: [list(shape), str(dtype)] for name, (shape, dtype) in schema.up.items()},
            "schedule": [count.rounds, count.exchanges, schedule.seed],
            "sigma": sigma,
        }
        text = json.dumps(agreed, sort_keys=True, default=str)
        return ReleasePlan(
            digest=blake2b(text.encode(), digest_size=32).hexdigest(),
            planned=count.rounds * count.exchanges,
            sigma=sigma,
            z=z,
            delta=privacy.delta,
            central=privacy.central,
            local=local,
            samples=samples,
        )

    def epsilon(self, releases: int) -> float:
        """Return the epsilon of so many messages of this plan."""
        if self.local is not None:
            steps = self.local.message(self.samples).times(releases)
            return steps.epsilon(self.sigma / self.local.settings.clip, self.delta)
        return ReleaseCount(releases).epsilon(self.z, self.delta)
