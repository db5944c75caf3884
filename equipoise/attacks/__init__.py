"""The registry of attacks; to add one, write it in a file of this package and add a line here."""

from equipoise.attacks.base import Attack, AttackContext
from equipoise.attacks.labels import LabelPoison
from equipoise.attacks.poison import poison_labels
from equipoise.attacks.uploads import Gaussian, SameValue, SignFlip
from equipoise.registry import Registry

__all__ = ["ATTACKS", "Attack", "AttackContext", "Gaussian", "LabelPoison", "SameValue", "SignFlip", "poison_labels"]

ATTACKS = Registry(
    "attacks",
    Attack,
    {
        "same-value": SameValue,
        "sign-flip": SignFlip,
        "gaussian": Gaussian,
        "label-poison": LabelPoison,
    },
)
