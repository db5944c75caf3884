"""The registry of algorithms: one file per paper, one line per algorithm here."""

from equipoise.algorithms.afl import AFL
from equipoise.algorithms.apfl import APFL
from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.cfl import CFL
from equipoise.algorithms.ditto import Ditto
from equipoise.algorithms.feature_decay import FeatureDecay
from equipoise.algorithms.fedadmm import FedADMM
from equipoise.algorithms.fedala import FedALA
from equipoise.algorithms.fedamp import FedAMP
from equipoise.algorithms.fedas import FedAS
from equipoise.algorithms.fedavg import FedAvg
from equipoise.algorithms.fedavg_ft import FedAvgFT
from equipoise.algorithms.fedbabu import FedBABU
from equipoise.algorithms.fedbn import FedBN
from equipoise.algorithms.fedcac import FedCAC
from equipoise.algorithms.fedcp import FedCP
from equipoise.algorithms.fedcr import FedCR
from equipoise.algorithms.feddbe import FedDBE
from equipoise.algorithms.feddyn import FedDyn
from equipoise.algorithms.fedeq import FeDEQ
from equipoise.algorithms.fedfomo import FedFomo
from equipoise.algorithms.fednova import FedNova
from equipoise.algorithms.fedpac import FedPAC
from equipoise.algorithms.fedper import FedPer
from equipoise.algorithms.fedproto import FedProto
from equipoise.algorithms.fedprox import FedProx
from equipoise.algorithms.fedprox_ft import FedProxFT
from equipoise.algorithms.fedreco import FedReCo
from equipoise.algorithms.fedrep import FedRep
from equipoise.algorithms.fedrod import FedRoD
from equipoise.algorithms.fl_deq import FlDEQ
from equipoise.algorithms.flame import Flame
from equipoise.algorithms.gpfl import GPFL
from equipoise.algorithms.knn_per import KnnPer
from equipoise.algorithms.learn2pfed.learn2pfed import Learn2pFed
from equipoise.algorithms.least_squares import LeastSquares
from equipoise.algorithms.lg_fedavg import LGFedAvg
from equipoise.algorithms.local import Local
from equipoise.algorithms.lp_proj import FlameLpProj, LpProj
from equipoise.algorithms.moon import Moon
from equipoise.algorithms.per_fedavg import PerFedAvg
from equipoise.algorithms.pfedfda import PFedFDA
from equipoise.algorithms.pfedme import PFedMe
from equipoise.algorithms.q_ffl import QFFL
from equipoise.algorithms.scaffold import Scaffold
from equipoise.algorithms.shared_least_squares import SharedLeastSquares
from equipoise.algorithms.term import TERM
from equipoise.registry import Registry

__all__ = [
    "AFL",
    "ALGORITHMS",
    "APFL",
    "CFL",
    "GPFL",
    "QFFL",
    "TERM",
    "Ditto",
    "FeDEQ",
    "FeatureDecay",
    "FedADMM",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBN",
    "FedCAC",
    "FedCP",
    "FedCR",
    "FedDBE",
    "FedDyn",
    "FedFomo",
    "FedNova",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedProxFT",
    "FedReCo",
    "FedRep",
    "FedRoD",
    "FlDEQ",
    "Flame",
    "FlameLpProj",
    "KnnPer",
    "LGFedAvg",
    "Learn2pFed",
    "LeastSquares",
    "Local",
    "LpProj",
    "Moon",
    "PFedFDA",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "SharedLeastSquares",
]

ALGORITHMS = Registry(
    "algorithms",
    Algorithm,  # type: ignore[type-abstract]
    {
        "local": Local,
        "feature-decay": FeatureDecay,
        "fedavg": FedAvg,
        "fedavg-ft": FedAvgFT,
        "fedprox": FedProx,
        "fedprox-ft": FedProxFT,
        "ditto": Ditto,
        "fedper": FedPer,
        "fedrep": FedRep,
        "flame": Flame,
        "pfedme": PFedMe,
        "fedadmm": FedADMM,
        "lp-proj": LpProj,
        "flame-lp-proj": FlameLpProj,
        "fedeq": FeDEQ,
        "fl-deq": FlDEQ,
        "knn-per": KnnPer,
        "cfl": CFL,
        "learn2pfed": Learn2pFed,
        "fedreco": FedReCo,
        "fedbabu": FedBABU,
        "fedpac": FedPAC,
        "fedcr": FedCR,
        "q-ffl": QFFL,
        "afl": AFL,
        "term": TERM,
        "scaffold": Scaffold,
        "feddyn": FedDyn,
        "fednova": FedNova,
        "lg-fedavg": LGFedAvg,
        "fedbn": FedBN,
        "fedproto": FedProto,
        "moon": Moon,
        "fedrod": FedRoD,
        "fedamp": FedAMP,
        "fedcac": FedCAC,
        "apfl": APFL,
        "per-fedavg": PerFedAvg,
        "fedala": FedALA,
        "fedfomo": FedFomo,
        "fedas": FedAS,
        "feddbe": FedDBE,
        "gpfl": GPFL,
        "fedcp": FedCP,
        "pfedfda": PFedFDA,
        "least-squares": LeastSquares,
        "shared-least-squares": SharedLeastSquares,
    },
)
