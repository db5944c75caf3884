"""The settings of a run that are not the algorithm's: how long, how many, and by what means."""

from typing import Annotated, Literal

import torch
from pydantic import Field

from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Settings

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Schedule(Settings):
    """How long, how many, how often."""

    seed: Annotated[int, Field(ge=0)] = 0
    "all randomness comes from it"
    rounds: Count = 50
    "how often server and clients talk"
    participation: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] = 1.0
    "clients in a round: a fraction of them (0.1), or a whole number (10)"
    evaluate_every: Count = 1
    "rounds between two evaluations; the last round is always evaluated"
    checkpoint_every: Count = 10
    "rounds between two checkpoints; the last round is always saved"
    select: Literal["validation", "test"] = "validation"
    "on which samples the better of personal and global is chosen; test flatters: it is then called an oracle"

    targets: tuple[float, ...] | None = None
    "scores; the summary tells in which round each kind of model first reached them"

    track: tuple[Literal["tensorboard", "mlflow"], ...] = ()
    "who else is told of rounds and results, beside the run folder; each is an extra to install"

    def cohort(self, clients: int) -> int:
        if isinstance(self.participation, int):
            if self.participation > clients:
                raise EquipoiseError(
                    f"participation = {self.participation} is more than the {clients} clients there are"
                )
            return self.participation
        return max(1, round(self.participation * clients))


class Engine(Settings):
    """How the clients are worked on."""

    kind: Literal["simulate", "flower"] = "simulate"
    "simulate: all clients in this process; flower: clients elsewhere (a deployment says so in its run.toml)"
    mode: Literal["auto", "threads", "stacked"] = "auto"
    "threads: a client a thread; stacked: many clients in one call; auto: stacked where the model's operators are small"
    workers: Annotated[int, Field(ge=0)] = 0
    "threads at work; 0: all cores"
    dtype: Literal["float32", "float64"] = "float32"
    "numbers to compute with"
    compile: bool = False
    "stacked mode: pass the step to torch.compile (needs a C++ compiler; seconds once, then faster)"
    memory_mb: Count = 1024
    "clients' states beyond this are kept in files of the run folder"
