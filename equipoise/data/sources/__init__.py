"""The registry of data sets, one line per set."""

import os
from pathlib import Path

from equipoise.data.source import Source
from equipoise.data.sources.cifar import CIFAR10, CIFAR100
from equipoise.data.sources.digits import DigitsByWriter
from equipoise.data.sources.electricity import Electricity
from equipoise.data.sources.femnist import FEMNIST
from equipoise.data.sources.folder import Folder
from equipoise.data.sources.function import adapt_source
from equipoise.data.sources.linear import LinearRegression
from equipoise.data.sources.loads import Loads
from equipoise.data.sources.medical import MedicalMNIST
from equipoise.data.sources.mnist import MNIST, FashionMNIST
from equipoise.data.sources.polynomial import Polynomial
from equipoise.data.sources.shakespeare import Shakespeare
from equipoise.registry import Registry

SOURCES = Registry(
    "data",
    Source,  # type: ignore[type-abstract]
    {
        "digits-by-writer": DigitsByWriter,
        "mnist": MNIST,
        "fashion-mnist": FashionMNIST,
        "cifar10": CIFAR10,
        "cifar100": CIFAR100,
        "medical-mnist": MedicalMNIST,
        "femnist": FEMNIST,
        "shakespeare": Shakespeare,
        "electricity": Electricity,
        "polynomial": Polynomial,
        "linear": LinearRegression,
        "folder": Folder,
        "loads": Loads,
    },
    adapt_source,
    "a function that returns the clients, or a class that derives from equipoise.Source",
)

Source.registry = SOURCES


def data_folder(given: Path | None) -> Path:
    """Return the data folder: the given one, else the environment variable EQUIPOISE_DATA, else ./data."""
    return given or Path(os.environ.get("EQUIPOISE_DATA", "data"))
