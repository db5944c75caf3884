"""The section [deploy]: what a deployment waits for, and what the server must be told of data that it never sees."""

from typing import Annotated, Literal

from pydantic import Field

from equipoise.settings import Count, Positive, Settings

Length = Annotated[int, Field(ge=1, le=10**6)]


class Deploy(Settings):
    """How a federation over real machines is run."""

    clients: Count = 2
    "clients that the first round waits for"
    wait: Positive = 600.0
    "seconds that it waits for them"
    deadline: Positive = 600.0
    "seconds after which a round closes with the answers that are there"
    minimum: Count = 1
    "accepted updates without which a round is asked again"
    attempts: Count = 3
    "how often a round is asked before the run stops"
    evaluate: bool = True
    "do clients send the scores of their models on their own data?"
    names: tuple[str, ...] = ()
    "the names of the clients that may take part; empty: all whom the SuperLink lets in"
    threads: Annotated[int, Field(ge=0)] = 0
    "threads of a client's computations; 0: all cores of its machine"
    title: str = ""
    "what the data are called in tables"
    shape: tuple[Length, ...] = ()
    "shape of a sample's input, such as [1, 28, 28]"
    inputs: Literal["numbers", "symbols"] = "numbers"
    "numbers, or whole numbers that stand for symbols (text)"
    outputs: Count | None = None
    "numbers that the model gives for a sample: classes, or the size of the target"
    targets: Literal["classes", "numbers"] = "classes"
    "labels, or numbers"
    target_shape: tuple[Length, ...] = ()
    "shape of a sample's target; empty for a single label or number"
