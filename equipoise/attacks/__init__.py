"""The registry of attacks; to add one, write it in a file of this package and add a line here."""

from equipoise.attacks.alie import ALIE
from equipoise.attacks.backdoor import Backdoor, DistributedBackdoor
from equipoise.attacks.base import Attack, AttackContext, PoisonContext, SuccessMeasure
from equipoise.attacks.control import Control
from equipoise.attacks.edge_case import EdgeCase
from equipoise.attacks.fang import FangKrum, FangTrimmed
from equipoise.attacks.free_rider import FreeRider
from equipoise.attacks.ipm import IPM
from equipoise.attacks.labels import LabelFlip, LabelPoison
from equipoise.attacks.mimic import Mimic
from equipoise.attacks.min_max import MinMax, MinSum
from equipoise.attacks.poison import TriggeredSamples, places, poison_samples, prepared_attack
from equipoise.attacks.scaling import Scaling
from equipoise.attacks.uploads import Gaussian, SameValue, SignFlip
from equipoise.attacks.weights import WeightInflation
from equipoise.registry import Registry

__all__ = [
    "ALIE",
    "ATTACKS",
    "IPM",
    "Attack",
    "AttackContext",
    "Backdoor",
    "Control",
    "DistributedBackdoor",
    "EdgeCase",
    "FangKrum",
    "FangTrimmed",
    "FreeRider",
    "Gaussian",
    "LabelFlip",
    "LabelPoison",
    "Mimic",
    "MinMax",
    "MinSum",
    "PoisonContext",
    "SameValue",
    "Scaling",
    "SignFlip",
    "SuccessMeasure",
    "TriggeredSamples",
    "WeightInflation",
    "places",
    "poison_samples",
    "prepared_attack",
]

ATTACKS = Registry(
    "attacks",
    Attack,
    {
        "none": Control,
        "same-value": SameValue,
        "sign-flip": SignFlip,
        "gaussian": Gaussian,
        "alie": ALIE,
        "ipm": IPM,
        "min-max": MinMax,
        "min-sum": MinSum,
        "fang-krum": FangKrum,
        "fang-trimmed": FangTrimmed,
        "mimic": Mimic,
        "scaling": Scaling,
        "weight-inflation": WeightInflation,
        "free-rider": FreeRider,
        "label-poison": LabelPoison,
        "label-flip": LabelFlip,
        "backdoor": Backdoor,
        "dba": DistributedBackdoor,
        "edge-case": EdgeCase,
    },
)
Attack.registry = ATTACKS
