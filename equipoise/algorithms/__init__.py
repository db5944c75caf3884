"""The registry of algorithms: one file a paper, one line here."""

from equipoise.algorithm import Algorithm
from equipoise.algorithms.ditto import Ditto
from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.fedavg_ft import FedAvgFT
from equipoise.algorithms.fedper import FedPer
from equipoise.algorithms.fedprox import FedProx
from equipoise.algorithms.fedprox_ft import FedProxFT
from equipoise.algorithms.fedrep import FedRep
from equipoise.algorithms.local import Local

__all__ = ["ALGORITHMS", "Ditto", "FedAvg", "FedAvgFT", "FedPer", "FedProx", "FedProxFT", "FedRep", "Local"]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "fedprox-ft": FedProxFT,
    "ditto": Ditto,
    "fedper": FedPer,
    "fedrep": FedRep,
}
