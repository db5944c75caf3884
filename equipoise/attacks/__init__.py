"""The registry of attacks: one file a subject, one line here."""

from equipoise.attacks.base import Attack, AttackContext
from equipoise.attacks.labels import LabelPoison
from equipoise.attacks.poison import poison_labels
from equipoise.attacks.uploads import Gaussian, SameValue, SignFlip

__all__ = ["ATTACKS", "Attack", "AttackContext", "Gaussian", "LabelPoison", "SameValue", "SignFlip", "poison_labels"]

ATTACKS: dict[str, type[Attack]] = {
    "same-value": SameValue,
    "sign-flip": SignFlip,
    "gaussian": Gaussian,
    "label-poison": LabelPoison,
}
