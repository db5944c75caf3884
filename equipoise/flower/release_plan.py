"""What an experiment releases of a client under privacy, and what the client's own settings allow."""

import json
from dataclasses import dataclass
from hashlib import blake2b

from equipoise.algorithms.capabilities import exchanges_of
from equipoise.algorithms.schema import MessageSchema
from equipoise.config.experiment import Experiment
from equipoise.privacy.accounting import ReleaseCount


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

    @staticmethod
    def of(experiment: Experiment, schema: MessageSchema, layout: str) -> "ReleasePlan":
        """Return the plan of an experiment with a section [privacy].

        Args:
            experiment: the experiment, as the client has it.
            schema: the shapes of its messages.
            layout: fingerprint of the layout of the model's parameters.
        """
        privacy, schedule, algorithm = experiment.privacy, experiment.schedule, experiment.algorithm
        assert privacy is not None
        count = ReleaseCount(schedule.rounds, exchanges_of(algorithm))
        sigma = privacy.noise(count)
        agreed = {
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
            z=0.0 if privacy.central else sigma / (2 * privacy.clip),
            delta=privacy.delta,
            central=privacy.central,
        )

    def epsilon(self, releases: int) -> float:
        """Return the epsilon of so many messages of this plan."""
        return ReleaseCount(releases).epsilon(self.z, self.delta)
