"""Settings of a run that are not the algorithm's: its schedule, and the engine that executes it."""

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator

from equipoise.errors import EquipoiseError
from equipoise.quantiles import QUANTILES, Pinball, checked_quantiles
from equipoise.settings import Count, Settings, Threads

_MIXED = "bf16-mixed"


class Schedule(Settings):
    """The schedule of a run: rounds, participation, evaluation and checkpoints."""

    unwritten: ClassVar[frozenset[str]] = frozenset({"cohorts"})

    seed: Annotated[int, Field(ge=0)] = 0
    "seed of all randomness"
    rounds: Count = 50
    "number of communication rounds"
    participation: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] = 1.0
    "clients in a round: a fraction of all (0.1), or a number (10)"
    cohorts: Literal["random", "turns"] = "random"
    "clients of a round: drawn at random, or in turn, so that all take part once before any does again"
    evaluate_every: Count = 1
    "number of rounds between two evaluations; the last round is always evaluated"
    checkpoint_every: Count = 10
    "number of rounds between two checkpoints; the last round is always saved"
    keep_checkpoints: Annotated[int, Field(ge=2, le=1000)] = 3
    "number of checkpoints that are kept; --resume --back N goes back to the Nth before the newest one"
    select: Literal["validation", "test"] = "validation"
    "samples that decide between personal and global model; test gives optimistic scores, which are called an oracle"

    metrics: tuple[str, ...] | None = None
    'metrics, such as ["accuracy", "macro-f1"], or own code; the first decides; left out: the one of the loss'

    loss: Literal["cross-entropy", "squared", "pinball"] | None = None
    "what training minimises; left out: cross-entropy for labels, squared for numbers; pinball forecasts quantiles"

    quantiles: tuple[float, ...] | None = None
    "quantiles that loss = pinball forecasts, 0.5 among them; left out: 0.1, 0.5, 0.9"

    targets: tuple[float, ...] | None = None
    "scores; the summary reports the round in which each kind of model first reached them"

    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    "trackers that also receive rounds and results, besides the run folder; each is an extra to install"

    @field_validator("metrics")
    @classmethod
    def _none_are_the_default(cls, metrics: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return metrics or None

    @model_validator(mode="after")
    def _quantiles_need_pinball(self) -> "Schedule":
        if self.quantiles is not None:
            if self.loss != "pinball":
                raise EquipoiseError("quantiles are forecast with loss = 'pinball'; add it, or leave quantiles out")
            checked_quantiles(self.quantiles)
        return self

    @property
    def pinball(self) -> Pinball | None:
        """Return the quantiles that the model forecasts, if it does."""
        return Pinball(self.quantiles or QUANTILES) if self.loss == "pinball" else None

    @property
    def outputs_per_number(self) -> int:
        """Return the number of outputs that a model has for each number of a target."""
        return 1 if self.pinball is None else len(self.pinball.quantiles)

    def cohort(self, clients: int) -> int:
        """Return the number of clients in a round."""
        if isinstance(self.participation, int):
            if self.participation > clients:
                raise EquipoiseError(
                    f"participation = {self.participation} is more than the {clients} clients there are"
                )
            return self.participation
        return max(1, round(self.participation * clients))


class Engine(Settings):
    """How clients are trained: the kind of engine, and its resources."""

    kind: Literal["simulate", "flower"] = "simulate"
    "simulate: all clients in this process; flower: clients on other machines (set in the run.toml of a deployment)"
    mode: Literal["auto", "threads", "stacked"] = "auto"
    "threads: one client per thread; stacked: many clients in one call; auto: stacked for models with small operators"
    workers: Threads = 0
    "number of threads; 0: all cores"
    precision: Literal["float32", "float64", "bf16-mixed"] = "float32"
    "number format of all computations; bf16-mixed: parameters in float32, many operators of the model in bfloat16"
    compile: bool = False
    "whether local steps are compiled (needs a C++ compiler; slow once, then faster)"
    device: str = "auto"
    "where clients are trained, as torch names it: cpu, cuda, cuda:1, mps; auto: an accelerator if there is one"
    data: Literal["auto", "device", "host"] = "auto"
    "where samples are kept if an accelerator is used: on the device, or on the host (streamed); auto: as they fit"
    deterministic: bool = True
    "whether an accelerator uses deterministic kernels, as far as there are any; often slower"
    memory_mb: Count = 1024
    "memory for clients' states in MB; those beyond it are kept in files of the run folder"

    @model_validator(mode="before")
    @classmethod
    def _read_old_name(cls, values: Any) -> Any:
        """Take `dtype`, as version 0.1 wrote it, for `precision`."""
        if isinstance(values, dict) and "dtype" in values and "precision" not in values:
            return {("precision" if key == "dtype" else key): value for key, value in values.items()}
        return values

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format of parameters and data."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def mixed(self) -> bool:
        """Tell whether the model's operators compute in bfloat16 where torch's autocast chooses it."""
        return self.precision == _MIXED
