"""Small convolutional networks for images."""

from typing import ClassVar

from torch import nn

from equipoise.models.base import BodyAndHead, ModelSettings, image_shape
from equipoise.settings import Count


class LeNet(ModelSettings):
    """LeNet-5 with ReLU: two 5x5 convolutions, three fully connected layers; the last one is the head."""

    paper: ClassVar[str] = "LeCun et al., 1998; 62,006 parameters on 32x32 colour images with 10 classes"

    hidden: tuple[Count, ...] = (120, 84)
    "widths of the fully connected layers before the head; without any, the head reads the output of the convolutions"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, *sides = image_shape(shape, 16, "lenet")
        height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
        body: list[nn.Module] = [
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
        ]
        width = 16 * height * width
        for next_width in self.hidden:
            body += [nn.Linear(width, next_width), nn.ReLU()]
            width = next_width
        return BodyAndHead(nn.Sequential(*body), nn.Linear(width, outputs))


class CNN(ModelSettings):
    """Padded 3x3 convolutions with pooling, one hidden layer; the last layer is the head."""

    paper: ClassVar[str] = "FLAME's CNN for CIFAR-10: 268,650 parameters on 32x32 colour images with 10 classes"

    channels: tuple[Count, ...] = (16, 32)
    "output channels of the convolutions"
    hidden: Count = 128
    "width of the layer before the head"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, height, width = image_shape(shape, 2 ** len(self.channels), "cnn")
        layers: list[nn.Module] = []
        for channels in self.channels:
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            inputs, height, width = channels, height // 2, width // 2
        layers += [nn.Flatten(), nn.Linear(inputs * height * width, self.hidden), nn.ReLU()]
        return BodyAndHead(nn.Sequential(*layers), nn.Linear(self.hidden, outputs))


class MmnistCNN(ModelSettings):
    """Two unpadded 3x3 convolutions with pooling, a hidden layer and dropout; the last layer is the head."""

    paper: ClassVar[str] = "FLAME's CNN for MMNIST: 206,678 parameters on 64x64 colour images with 6 classes"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, *sides = image_shape(shape, 10, "cnn-mmnist")
        height, width = (((side - 2) // 2 - 2) // 2 for side in sides)
        body = nn.Sequential(
            *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(16 * height * width, 64), nn.ReLU(), nn.Dropout(0.2)),
        )
        return BodyAndHead(body, nn.Linear(64, outputs))


class FemnistCNN(ModelSettings):
    """A padded 7x7 and a padded 3x3 convolution with pooling; the one layer after them is the head."""

    paper: ClassVar[str] = "FLAME's CNN for FEMNIST: 214,590 parameters on 28x28 grey images with 62 classes"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, height, width = image_shape(shape, 4, "cnn-femnist")
        body = nn.Sequential(
            *(nn.Conv2d(channels, 32, 7, padding=3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
        )
        return BodyAndHead(body, nn.Linear(64 * (height // 4) * (width // 4), outputs))
