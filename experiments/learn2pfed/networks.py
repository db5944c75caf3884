"""Print the counts of Tables V and VI: what of LeNet stays with a client, what its cells send, and its work.

    python experiments/learn2pfed/networks.py

Images are 32x32 with three colours. Work is that of a forward pass of one image.
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from equipoise.models import MODELS
from equipoise.reproduction.result_tables import markdown_table

LAYERS: list[tuple[int, ...]] = [(120, 84), (120,), ()]
"""Fully connected layers before the last one, which cells fit."""
PAPER = [(61.14, 14.72), (50.99, 17.65), (2.87, 313.58)]
"""Table V: thousands of parameters that stay, and the ratio in %."""


def lenet(hidden: tuple[int, ...]) -> nn.Module:
    module: nn.Module = MODELS["lenet"](hidden=hidden).build((3, 32, 32), 10)
    return module


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def table5() -> str:
    """Return what stays, what one exchange sends, their ratio, and what the paper's ratio is a ratio of."""
    rows = []
    for hidden, (kept, percent) in zip(LAYERS, PAPER, strict=True):
        module = lenet(hidden)
        head = module.get_submodule("head")
        body = size(module) - size(head)
        ours = [str(list(hidden)), f"{body:,}", f"{size(head):,}", f"{size(head) / body:.2%}"]
        rows.append([*ours, f"{kept} thousand", f"{percent}%", f"{kept * percent / 100:.2f} thousand"])
    names = ["layers before the cells", "stays", "sent in an exchange", "ratio"]
    return markdown_table([*names, "paper: stays", "paper: ratio", "their product"], rows)


def table6() -> str:
    """Return parameters and multiply-adds of the whole network, and with one linear head after the convolutions."""
    rows = []
    for title, hidden in (("whole LeNet (FedAvg)", LAYERS[0]), ("convolutions and one linear head", LAYERS[-1])):
        module = lenet(hidden)
        counter = FlopCounterMode(display=False)
        with counter:
            module(torch.zeros(1, 3, 32, 32))
        convolutions = sum(size(m) for m in module.modules() if isinstance(m, nn.Conv2d))
        linear = size(module) - convolutions
        rows.append([title, f"{convolutions:,}", f"{linear:,}", f"{counter.get_total_flops() / 2e6:.4f}"])
    return markdown_table(["network", "convolutions", "linear layers", "million multiply-adds"], rows)


if __name__ == "__main__":
    print(f"{table5()}\n\n{table6()}")
