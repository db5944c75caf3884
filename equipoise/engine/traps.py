"""Warnings before the first round of what is allowed and probably not meant."""

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.flame import Flame
from equipoise.algorithms.schema import MessageSchema
from equipoise.config.engine import Schedule
from equipoise.parameter_space import ParameterSpace


def find_traps(
    space: ParameterSpace, algorithm: Algorithm, schedule: Schedule, schema: MessageSchema, clients: int
) -> list[str]:
    """Return a sentence about each trap.

    Args:
        space: the parameters of the model, body and head.
        algorithm: the algorithm.
        schedule: the schedule of the run.
        schema: the shapes of the algorithm's messages.
        clients: number of clients that train.
    """
    name, found = type(algorithm).__name__, []
    # Who sends nothing by design is not mistaken.
    if algorithm.requires.head and space.body_size == 0 and schema.up and schema.parameters_shared == 0:
        found.append(
            f"{name} shares all of the model but its head, and here the whole model is head: nothing is shared, and "
            "every client trains alone; use a model with layers before the head, or another algorithm"
        )
    if algorithm.requires.head and space.body_size == space.size:
        found.append(
            f"{name} treats the model's head differently from the rest, and here the head is empty, so that nothing "
            f"of the model is {'personal' if schema.parameters_shared else 'shared'}; name the submodule that is it"
        )
    if type(schedule.participation) is int and schedule.participation == 1 < clients:
        found.append(
            f"participation = 1 is one client of {clients} in a round; for all clients write 1.0, with a decimal point"
        )
    if (warmup := algorithm.schedule.warmup) >= schedule.rounds:
        found.append(
            f"algorithm.schedule warms up for {warmup} rounds, and the run has {schedule.rounds}: the schedule itself "
            "never begins"
        )
    if isinstance(algorithm, Flame) and (text := algorithm.unmet_condition(clients)) is not None:
        found.append(text)
    return found
