"""The registry of models: one line per model."""

from equipoise.models.base import ModelSettings
from equipoise.models.convolutional import CNN, FemnistCNN, LeNet, MmnistCNN
from equipoise.models.dense import MLP, Linear, Softmax
from equipoise.models.fedeq import DeqMLP, DeqResNetM, DeqResNetS
from equipoise.models.fl_deq import CnnL, DeqCNN, DeqResidual, ResNet5Blocks
from equipoise.models.gaussian import GaussianLeNet, GaussianMLP
from equipoise.models.own import adapt_model
from equipoise.models.recurrent import LSTM
from equipoise.models.resnets import ResNet14, ResNet18, ResNet20, ResNet34
from equipoise.models.transformers import DeqTransformer, Transformer, Transformer8
from equipoise.registry import Registry

MODELS = Registry(
    "models",
    ModelSettings,  # type: ignore[type-abstract]
    {
        "linear": Linear,
        "softmax": Softmax,
        "mlp": MLP,
        "lenet": LeNet,
        "gaussian-mlp": GaussianMLP,
        "gaussian-lenet": GaussianLeNet,
        "cnn": CNN,
        "cnn-mmnist": MmnistCNN,
        "cnn-femnist": FemnistCNN,
        "cnn-L": CnnL,
        "resnet-5-blocks": ResNet5Blocks,
        "resnet-14": ResNet14,
        "resnet-18": ResNet18,
        "resnet-20": ResNet20,
        "resnet-34": ResNet34,
        "lstm": LSTM,
        "transformer": Transformer,
        "transformer-8": Transformer8,
        "deq-mlp": DeqMLP,
        "deq-resnet-s": DeqResNetS,
        "deq-resnet-m": DeqResNetM,
        "deq-residual": DeqResidual,
        "deq-cnn": DeqCNN,
        "deq-transformer": DeqTransformer,
    },
    adapt_model,
    "an nn.Module class, a function that returns a module, or a class that derives from equipoise.ModelSettings",
)
