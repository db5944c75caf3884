"""The registry of models: one line each."""

from equipoise.models.base import ModelSettings
from equipoise.models.convolutional import CNN, LeNet
from equipoise.models.dense import MLP, Softmax

MODELS: dict[str, type[ModelSettings]] = {"softmax": Softmax, "mlp": MLP, "lenet": LeNet, "cnn": CNN}
