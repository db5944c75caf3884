"""The registry of attacks: one file a subject, one line here."""

from equipoise.attacks.base import Attack, Scene
from equipoise.attacks.labels import LabelPoison
from equipoise.attacks.poison import poisoned
from equipoise.attacks.uploads import Gaussian, SameValue, SignFlip

__all__ = ["ATTACKS", "Attack", "Gaussian", "LabelPoison", "SameValue", "Scene", "SignFlip", "poisoned"]

ATTACKS: dict[str, type[Attack]] = {
    "same-value": SameValue,
    "sign-flip": SignFlip,
    "gaussian": Gaussian,
    "label-poison": LabelPoison,
}
