"""Schedules of learning rates over the rounds of a run."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, WithJsonSchema

from equipoise.errors import EquipoiseError
from equipoise.registry import function_name, load_object
from equipoise.settings import MOST, Count, Settings, read

RateFunction = Callable[[int, int], float]
"""A user's own schedule: a function of the round, from 1, and of the number of rounds, that returns the factor."""

Share = Annotated[float, Field(ge=0, le=1)]


class RateSchedule(Settings):
    """A factor for all learning rates of local training, by the round.

    With a warm-up of W rounds, the factor grows linearly to 1 in rounds 1 to W; the schedule itself begins after that.
    """

    kind: Literal["constant", "step", "exponential", "cosine", "function"] = "constant"
    "how the factor falls: not at all, by steps, by the same ratio in every round, by half a cosine, by your function"
    warmup: Annotated[int, Field(ge=0, le=MOST)] = 0
    "rounds of linear warm-up before the schedule begins"
    every: Count = 10
    "rounds between two steps of kind step"
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    "factor of each step of kind step, or of each round of kind exponential"
    final: Share = 0.0
    "factor in the last round of kind cosine"
    function: str = ""
    "your own function of (round, rounds) for kind function, as 'package.module:name' or 'file.py:name'"
    _call: RateFunction | None = PrivateAttr(default=None)

    def factor(self, round: int, rounds: int) -> float:
        """Return the factor of a round.

        Args:
            round: the number of the round, from 1.
            rounds: the number of rounds of the run.
        """
        if round <= self.warmup:
            return round / self.warmup
        k, last = round - self.warmup - 1, max(rounds - self.warmup - 1, 1)
        if self.kind == "function":
            return self._own(round, rounds)
        if self.kind == "step":
            return self.ratio ** (k // self.every)
        if self.kind == "exponential":
            return self.ratio**k
        if self.kind == "cosine":
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * min(k / last, 1))) / 2
        return 1.0

    def _own(self, round: int, rounds: int) -> float:
        if self._call is None:
            raise EquipoiseError("a schedule of kind 'function' is given as the function itself: schedule=my_function")
        try:
            factor = float(self._call(round, rounds))
        except Exception as error:  # whatever the user's function raises
            raise EquipoiseError(
                f"the schedule {self.function} fails for round {round} of {rounds}: {type(error).__name__}: {error}"
            ) from error
        if not (math.isfinite(factor) and factor >= 0):
            raise EquipoiseError(
                f"the schedule {self.function} returns {factor} for round {round}; a factor must be 0 or more"
            )
        return factor

    @property
    def own_function(self) -> RateFunction | None:
        """Return the user's own function, for kind function."""
        return self._call

    @property
    def depends_on_rounds(self) -> bool:
        """Tell whether the factor of a round depends on the number of rounds."""
        return self.kind in ("cosine", "function")

    @staticmethod
    def of(value: Any) -> Any:
        """Return the schedule that a value stands for: its kind, a table of settings, a function or its place."""
        if callable(value) and not isinstance(value, (RateSchedule, type)):
            return RateSchedule._with(RateSchedule(kind="function", function=function_name(value)), value)
        if isinstance(value, str):
            value = {"kind": "function", "function": value} if ":" in value else {"kind": value}
        if not isinstance(value, dict):
            return value
        schedule = read(RateSchedule, value, "algorithm.schedule")
        if schedule.kind != "function":
            return schedule
        function = load_object(schedule.function, "algorithm.schedule.function")
        if not callable(function):
            raise EquipoiseError(f"algorithm.schedule.function = {schedule.function!r} is not a function")
        return RateSchedule._with(schedule, function)

    @staticmethod
    def _with(schedule: "RateSchedule", function: RateFunction) -> "RateSchedule":
        schedule._call = function
        return schedule

    def table(self) -> dict[str, Any]:
        """Return the settings that this kind of schedule uses, as a TOML table."""
        used = {"step": ("every", "ratio"), "exponential": ("ratio",), "cosine": ("final",), "function": ("function",)}
        return {
            "kind": self.kind,
            "warmup": self.warmup,
            **{key: getattr(self, key) for key in used.get(self.kind, ())},
        }


ScheduleSetting = Annotated[
    RateSchedule,
    BeforeValidator(RateSchedule.of),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["constant", "step", "exponential", "cosine", "FILE.py:NAME of your own function"]},
                {"type": "object"},
            ]
        }
    ),
]
