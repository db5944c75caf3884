"""The public names of `import equipoise`."""

from equipoise.algorithms import (
    ALGORITHMS,
    CFL,
    Ditto,
    FeatureDecay,
    FedADMM,
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedCR,
    FeDEQ,
    FedPAC,
    FedPer,
    FedProx,
    FedProxFT,
    FedReCo,
    FedRep,
    Flame,
    FlameLpProj,
    FlDEQ,
    KnnPer,
    Learn2pFed,
    LeastSquares,
    Local,
    LpProj,
    PFedMe,
    SharedLeastSquares,
)
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.api import train
from equipoise.attacks import ATTACKS, Attack, AttackContext, Gaussian, LabelPoison, SameValue, SignFlip
from equipoise.callbacks import (
    CALLBACKS,
    BestModel,
    Callback,
    Checkpoints,
    EarlyStopping,
    MLflow,
    Progress,
    RunContext,
    TensorBoard,
    WandB,
)
from equipoise.callbacks.messages import RunWarning
from equipoise.config.device_classes import Devices
from equipoise.data.config import load_data
from equipoise.data.federation import Federation, from_clients
from equipoise.data.partitions.base import Partition
from equipoise.data.pool import Pool
from equipoise.data.source import LoadRequest, Source
from equipoise.engine.model_files import load_model
from equipoise.engine.unscaled import Unscaled
from equipoise.errors import EquipoiseError, Interrupted, RunFailed
from equipoise.metrics import Metric
from equipoise.models.base import ModelSettings
from equipoise.parameter_space import ParameterSpace
from equipoise.privacy.mechanisms import Privacy
from equipoise.quantiles import Pinball
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
from equipoise.runs.adaptation import AdaptedClients
from equipoise.runs.load import load_result
from equipoise.runs.result import Result
from equipoise.state import RoundUploads, State, Upload, Uploads

__all__ = [
    "ALGORITHMS",
    "ATTACKS",
    "CALLBACKS",
    "CFL",
    "REDUCERS",
    "AdaptedClients",
    "Algorithm",
    "Attack",
    "AttackContext",
    "BestModel",
    "Callback",
    "Checkpoints",
    "Devices",
    "Ditto",
    "EarlyStopping",
    "EquipoiseError",
    "FeDEQ",
    "FeatureDecay",
    "FedADMM",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedCR",
    "FedPAC",
    "FedPer",
    "FedProx",
    "FedProxFT",
    "FedReCo",
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
    "Learn2pFed",
    "LeastSquares",
    "LoadRequest",
    "Local",
    "LocalData",
    "LpProj",
    "MLflow",
    "Mean",
    "Median",
    "Metric",
    "ModelSettings",
    "MultiKrum",
    "PFedMe",
    "ParameterSpace",
    "Partition",
    "Pinball",
    "Pool",
    "Privacy",
    "Progress",
    "Reducer",
    "Result",
    "RoundUploads",
    "RunContext",
    "RunFailed",
    "RunWarning",
    "SameValue",
    "SharedLeastSquares",
    "SignFlip",
    "Source",
    "Start",
    "State",
    "TensorBoard",
    "TrimmedMean",
    "Unscaled",
    "Upload",
    "Uploads",
    "WandB",
    "WeightedMean",
    "from_clients",
    "load_data",
    "load_model",
    "load_result",
    "train",
]
