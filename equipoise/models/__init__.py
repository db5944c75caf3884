"""The registry of models: one line each."""

from equipoise.models.attention import Transformer
from equipoise.models.base import ModelSettings
from equipoise.models.convolutional import CNN, FemnistCNN, LeNet, MmnistCNN
from equipoise.models.dense import MLP, Linear, Softmax
from equipoise.models.recurrent import LSTM

MODELS: dict[str, type[ModelSettings]] = {
    "linear": Linear,
    "softmax": Softmax,
    "mlp": MLP,
    "lenet": LeNet,
    "cnn": CNN,
    "cnn-mmnist": MmnistCNN,
    "cnn-femnist": FemnistCNN,
    "lstm": LSTM,
    "transformer": Transformer,
}
