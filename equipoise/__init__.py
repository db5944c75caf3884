"""Personalised federated learning: every client ends with a model of its own, and all learn from each other."""

from equipoise.algorithm import Algorithm, LocalData, Start
from equipoise.algorithms import (
    ALGORITHMS,
    Ditto,
    FedADMM,
    FedAvg,
    FedAvgFT,
    FeDEQ,
    FedPer,
    FedProx,
    FedProxFT,
    FedRep,
    Flame,
    FlameLpProj,
    FlDEQ,
    KnnPer,
    Local,
    LpProj,
    PFedMe,
)
from equipoise.api import Result, train
from equipoise.attacks import ATTACKS, Attack, Gaussian, LabelPoison, SameValue, Scene, SignFlip
from equipoise.data.federation import Federation, from_clients
from equipoise.data.section import load_data
from equipoise.devices import Devices
from equipoise.errors import EquipoiseError, Interrupted, RunFailed
from equipoise.export import load_model
from equipoise.losses import Metric
from equipoise.reducers import (
    REDUCERS,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    Reducer,
    TrimmedMean,
    WeightedMean,
)
from equipoise.space import Space
from equipoise.state import State, Upload, Uploads

__all__ = [
    "ALGORITHMS",
    "ATTACKS",
    "REDUCERS",
    "Algorithm",
    "Attack",
    "Devices",
    "Ditto",
    "EquipoiseError",
    "FeDEQ",
    "FedADMM",
    "FedAvg",
    "FedAvgFT",
    "FedPer",
    "FedProx",
    "FedProxFT",
    "FedRep",
    "Federation",
    "FlDEQ",
    "Flame",
    "FlameLpProj",
    "Gaussian",
    "GeometricMedian",
    "Interrupted",
    "KnnPer",
    "Krum",
    "LabelPoison",
    "Local",
    "LocalData",
    "LpProj",
    "Mean",
    "Median",
    "Metric",
    "MultiKrum",
    "PFedMe",
    "Reducer",
    "Result",
    "RunFailed",
    "SameValue",
    "Scene",
    "SignFlip",
    "Space",
    "Start",
    "State",
    "TrimmedMean",
    "Upload",
    "Uploads",
    "WeightedMean",
    "from_clients",
    "load_data",
    "load_model",
    "train",
]
