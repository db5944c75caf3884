"""A convolutional equilibrium model on CIFAR-10 in ordinary PyTorch, without a federation.

python examples/equilibrium_cifar10.py --data DIR [--epochs N] [--minutes M]

DIR has cifar-10-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html, binary version), or the .bin files in it.
"""

import argparse
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

from equipoise.equilibrium import (
    Equilibrium,
    Solves,
    VariationalDropout2d,
    auxiliary_loss,
    layers,
    spectral_radius,
)


def read(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the images and labels for training, and those for testing."""
    archive = folder / "cifar-10-binary.tar.gz"
    files: dict[str, bytes] = {}
    if archive.is_file():
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.name.endswith(".bin") and (opened := tar.extractfile(member)):
                    files[Path(member.name).name] = opened.read()
    else:
        files = {path.name: path.read_bytes() for path in folder.glob("**/*.bin")}
    if "test_batch.bin" not in files or len(files) < 2:
        raise SystemExit(f"{folder} has neither cifar-10-binary.tar.gz nor the .bin files in it")

    def joined(names: list[str]) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.frombuffer(b"".join(files[n] for n in names), np.uint8).reshape(-1, 3073).copy())
        return rows[:, 1:].view(-1, 3, 32, 32), rows[:, 0].long()

    test = ["test_batch.bin"]
    return *joined(sorted(set(files) - {*test})), *joined(test)


def scaled(pixels: Tensor) -> Tensor:
    """Return bytes as numbers of about mean 0 and standard deviation 1, in the layout that convolutions prefer."""
    return ((pixels.float() / 255 - 0.47) / 0.25).contiguous(memory_format=torch.channels_last)


def augmented(pixels: Tensor) -> Tensor:
    """Return images shifted by up to four pixels each way, half of them mirrored."""
    n = len(pixels)
    padded = F.pad(pixels, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, n, 1)) + torch.arange(32)
    columns = torch.where(torch.rand(n, 1) < 0.5, left, left.flip(1))
    shifted = padded[torch.arange(n)[:, None, None], :, top[:, :, None], columns[:, None, :]]
    return shifted.permute(0, 3, 1, 2)


class Cell(nn.Module):
    """f(z, x) = norm(relu(x + W * dropout(z)))."""

    def __init__(self, channels: int, dropout: float):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(8, channels)
        self.dropout = VariationalDropout2d(dropout)  # the same channels in all iterations of a solve
        nn.init.normal_(self.conv.weight, std=0.01)  # so small that at first f is a contraction

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.norm(F.relu(x + self.conv(self.dropout(z))))
        return out


def network(channels: int, dropout: float, jacobian_weight: float) -> nn.Module:
    """Return two convolutions that shrink the image, the equilibrium, and a linear layer."""
    layer = Equilibrium(
        Cell(channels, dropout),
        tol=1e-2,
        limit=12,
        gradient="implicit",
        backward_tol=0.1,
        jacobian_weight=jacobian_weight,
        jacobian_probability=0.3,
        warm_start="off",
    )
    layer.quiet = True  # the share of unconverged solves is printed instead
    return nn.Sequential(
        *(nn.Conv2d(3, channels // 2, 3, padding=1), nn.GroupNorm(8, channels // 2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(channels // 2, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels)),
        layer,
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10)),
    ).to(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of images that are classified correctly."""
    model.eval()
    right = sum(int((model(scaled(a)).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True))
    return right / len(x)


def radius(model: nn.Module, x: Tensor) -> Tensor:
    """Return the spectral radii of ∂f/∂z at the fixed points of some images."""
    model.eval()
    ((_, layer),) = layers(model)
    place = list(model).index(layer)  # type: ignore[arg-type]
    with torch.no_grad():
        inputs = model[:place](scaled(x))  # type: ignore[index]
        return spectral_radius(layer.f, layer(inputs), inputs)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Train a convolutional equilibrium model on CIFAR-10.")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data set")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so much computing time")
    parser.add_argument("--images", type=int, default=None, help="use only so many training images")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--jacobian-weight", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.epochs < 1:
        raise SystemExit(f"--epochs {given.epochs} is not allowed; it must be at least 1")
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    x, y, test_x, test_y = read(given.data)
    if given.images is not None and given.images < 64:
        raise SystemExit(f"--images {given.images} is not allowed; training needs at least one batch of 64 images")
    x, y = x[: given.images], y[: given.images]
    if len(x) < 64:
        raise SystemExit(f"{given.data} has {len(x)} training images; training needs at least one batch of 64")
    model = network(given.channels, given.dropout, given.jacobian_weight)
    ((_, layer),) = layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    steps = given.epochs * (len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, max(2, steps), pct_start=0.2)
    began = time.process_time()
    with Progress() as progress:
        task = progress.add_task("training", total=steps)
        for epoch in range(given.epochs):
            model.train()
            layer.solves = Solves()
            for index in torch.randperm(len(x))[: len(x) // 64 * 64].split(64):
                loss = F.cross_entropy(model(scaled(augmented(x[index]))), y[index], label_smoothing=0.05)
                penalty = auxiliary_loss(model)  # weight * ‖∂f/∂z‖² / d in a random third of the steps
                optimizer.zero_grad()
                (loss if penalty is None else loss + penalty).backward()
                optimizer.step()
                schedule.step()
                progress.advance(task)
            forward, backward = layer.solves.forward, layer.solves.backward
            spent = (time.process_time() - began) / 60
            progress.console.print(
                f"epoch {epoch + 1}: test accuracy {accuracy(model, test_x[:1000], test_y[:1000]):.1%} of 1000, "
                f"{forward.mean:.1f} iterations per sample, unconverged {forward.failed:.1%} forward and "
                f"{backward.failed:.1%} backward, {spent:.1f} min"
            )
            if spent > given.minutes:
                break
    found = accuracy(model, test_x, test_y)
    radii = radius(model, test_x[:64])
    print(f"test accuracy {found:.1%} on {len(test_x)} images; unconverged solves in training {forward.failed:.1%}")
    print(f"spectral radius at the fixed point: mean {radii.mean():.2f}, largest {radii.max():.2f}")
    return found


if __name__ == "__main__":
    main()
