"""Handwritten digits with the writers' names: an excerpt that comes with the package."""

from importlib.resources import files

import numpy as np
import torch

from equipoise.data.idx import images
from equipoise.data.pool import Pool


def load_excerpt() -> Pool:
    with files("equipoise.data").joinpath("digits-by-writer.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        x, y, writer = arrays["x"], arrays["y"], arrays["writer"]
    owners = np.array([f"writer-{w:04d}" for w in writer])
    return Pool(images(x), torch.from_numpy(y.astype(np.int64)), classes=10, owners=owners)
