"""Checks of settings that a simulation allows and a deployment does not."""

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import Start
from equipoise.config.engine import Schedule
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from equipoise.training.sample_privacy import SamplePrivacy
from equipoise.training.task import Task


def check_deployable(
    task: Task, algorithm: Algorithm, schedule: Schedule, start: Start, privacy: Privacy | None
) -> None:
    """Raise an error for settings that need to know in advance who takes part, or that clients cannot keep.

    Args:
        task: the task.
        algorithm: the algorithm.
        schedule: the schedule.
        start: what is known before the first round.
        privacy: the section [privacy].
    """
    if schedule.cohorts != "random":
        raise EquipoiseError("cohorts = 'turns' needs all clients in every round, and in a deployment they come and go")
    if privacy is None:
        return
    if privacy.bands != 1:
        raise EquipoiseError(
            "privacy.bands needs to know in advance who takes part in which round, and in a deployment clients come "
            "and go; use independent noise, privacy.bands = 1"
        )
    if privacy.adaptive is not None:
        raise EquipoiseError(
            "privacy.adaptive is possible in simulations only, as clients of a deployment clip to the norm in their "
            "own copy of the experiment; give a fixed privacy.clip"
        )
    if privacy.of_samples:
        SamplePrivacy.of(privacy, task, algorithm, start, schedule.rounds)  # raises if noise does not cover it
