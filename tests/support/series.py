"""Small federations of time series, whose forecasts can be computed by hand."""

import numpy as np
import torch

from equipoise.data.federation import Federation, RaggedIndices
from equipoise.data.series_facts import SeriesFacts
from equipoise.data.time_split import parts_in_time

START = 24 * 60 * 365
"""Minutes from 1970 to the first value, on 1 January 1971."""


def federation(
    clients: int = 3,
    hours: int = 24 * 30,
    window: int = 24,
    horizon: int = 2,
    unseen: tuple[str, ...] = (),
    split: tuple[float, float, float] = (0.6, 0.2, 0.2),
) -> Federation:
    """Return clients c0, c1, … with an hourly load that repeats by day and week, noise, and scales of their own."""
    rng, time = np.random.default_rng(0), np.arange(hours)
    names = tuple(f"c{k}" for k in range(clients))
    values, asked, parts, shift, size = [], [], [], [], []
    for k in range(clients):
        daily, weekly = np.sin(2 * np.pi * (time / 24 + k / 7)), np.cos(2 * np.pi * time / 168)
        load = (k + 1) * (5 + 2 * daily + weekly + 0.3 * rng.normal(size=hours))
        at = np.arange(window, hours - horizon + 1)
        part = parts_in_time(at, at + horizon - 1, split)
        past = load[: at[part == 0].max() + horizon]
        shift, size = [*shift, past.min()], [*size, np.ptp(past)]
        values.append(((load - past.min()) / np.ptp(past)).astype(np.float32))
        asked, parts = [*asked, at[part >= 0]], [*parts, part[part >= 0]]
    begins = np.arange(clients + 1) * hours
    flat, owner = np.concatenate(values), np.repeat(np.arange(clients), [len(each) for each in asked])
    target, part = np.concatenate([begins[k] + each for k, each in enumerate(asked)]), np.concatenate(parts)
    trained = np.array([each[p == 0].max() + horizon for each, p in zip(asked, parts, strict=True)])
    facts = SeriesFacts(
        names, 60, horizon, flat, begins, np.full(clients, START), np.array(shift), np.array(size), trained,
        owner, target, "kW",
    )  # fmt: skip
    x, y = flat[target[:, None] + np.arange(-window, 0)], flat[target[:, None] + np.arange(horizon)]
    splits = (RaggedIndices([np.flatnonzero((owner == k) & (part == p)) for k in range(clients)]) for p in range(3))
    made = Federation(torch.from_numpy(x), torch.from_numpy(y), names, *splits, title="loads", series=facts)
    return made if not unseen else Federation(**{**vars(made), "unseen": frozenset(unseen)})
