"""The section [deploy]: what a deployment waits for, and what the server must know about data that it never sees."""

from typing import Annotated, Literal

from pydantic import Field

from equipoise.settings import Count, NonNegative, Positive, Settings, Threads

Length = Annotated[int, Field(ge=1, le=10**6)]


class Deploy(Settings):
    """Settings of a deployment on real machines."""

    clients: Count = 2
    "number of clients that the first round waits for"
    wait: Positive = 600.0
    "seconds that the first round waits for them"
    deadline: Positive = 600.0
    "seconds after which a round closes with the replies received so far"
    minimum: Count = 1
    "smallest number of accepted updates; a round with fewer is repeated"
    attempts: Count = 3
    "number of times that a round is tried before the run stops"
    evaluate: bool = True
    "whether clients send the scores of their models on their own data"
    largest_weight: Positive = 1e6
    "largest weight of an update, and largest number of samples that a client may announce"
    largest_norm: NonNegative = 1000.0
    "how many times longer than the median of the other clients' updates an update may be; 0: as long as it likes"
    names: tuple[str, ...] = ()
    "names of the clients that may take part; empty: all that the SuperLink admits"
    threads: Threads = 0
    "number of threads that a client computes with; 0: all cores of its machine"
    title: str = ""
    "name of the data in tables"
    shape: tuple[Length, ...] = ()
    "shape of a sample's input, such as [1, 28, 28]"
    inputs: Literal["numbers", "symbols"] = "numbers"
    "kind of the inputs: numbers, or integers that stand for symbols (text)"
    outputs: Count | None = None
    "number of outputs of the model for a sample: classes, or the size of the target"
    targets: Literal["classes", "numbers"] = "classes"
    "kind of the targets: labels, or numbers"
    split: tuple[float, float, float] | None = None
    "fractions for training, validation and test of clients whose samples are not divided; by default data.split"
    target_shape: tuple[Length, ...] = ()
    "shape of a sample's target; empty for a single label or number"
    horizon: Annotated[int, Field(ge=0, le=10**6)] = 0
    "of time series: number of values that a sample forecasts; 0: samples are no windows of time series"
    step: Count = 60
    "of time series: minutes between two values"
    unit: Annotated[str, Field(max_length=64)] = ""
    "of time series: unit of the data, such as kW, in which forecasts are scored"
