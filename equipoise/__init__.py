"""Personalised federated learning: every client ends with a model of its own, and all learn from each other."""

from equipoise.algorithm import Algorithm, LocalData, Start
from equipoise.algorithms import ALGORITHMS, Ditto, FedAvg, FedAvgFT, FedPer, FedProx, FedProxFT, FedRep, Local
from equipoise.api import Result, train
from equipoise.data.federation import Federation, from_clients
from equipoise.data.section import load_data
from equipoise.errors import EquipoiseError, Interrupted, RunFailed
from equipoise.export import load_model
from equipoise.losses import Metric
from equipoise.space import Space
from equipoise.state import State, Upload, Uploads

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Ditto",
    "EquipoiseError",
    "FedAvg",
    "FedAvgFT",
    "FedPer",
    "FedProx",
    "FedProxFT",
    "FedRep",
    "Federation",
    "Interrupted",
    "Local",
    "LocalData",
    "Metric",
    "Result",
    "RunFailed",
    "Space",
    "Start",
    "State",
    "Upload",
    "Uploads",
    "from_clients",
    "load_data",
    "load_model",
    "train",
]
