"""Your own module and your own data: a personal model for every client, in about ten lines.

python examples/own_model.py
"""

import numpy as np
from torch import nn

import equipoise as eq

rng = np.random.default_rng(0)
common = rng.normal(size=(20, 3))
clients = []
for _ in range(12):  # for example hospitals: the same task, each with its own bias and number of samples
    x = rng.normal(size=(rng.integers(40, 120), 20)).astype("float32")
    y = (x @ (common + 0.7 * rng.normal(size=common.shape))).argmax(axis=1)
    clients.append((x, y))

module = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
result = eq.train(module, clients, eq.Ditto(lam=0.1, lr=0.1, batch=16), head="2", rounds=30)

print({kind: round(result.summary[kind]["accuracy"], 3) for kind in ("personal", "global", "hybrid")})
print(result.personal(3))  # an ordinary nn.Module, ready to predict
print(result.global_model()[0].weight.shape)
