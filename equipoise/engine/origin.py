"""What a simulation begins with beyond its settings (module, weights, data, split), and how two such origins differ."""

from collections.abc import Iterable
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.data.federation import SPLITS, Federation
from equipoise.training.task import Task


def describe_origin(federation: Federation, task: Task) -> dict[str, Any]:
    """Return digests and shapes of everything that a run begins with, as JSON, for its checkpoints."""
    return {
        "parameters": [[entry.name, list(entry.shape)] for entry in task.space.entries],
        "head": task.space.size - task.space.body_size,
        "weights": _digest(task.w0.cpu().numpy()),
        **_describe_data(federation),
    }


def _describe_data(federation: Federation) -> dict[str, Any]:
    splits = [getattr(federation, split) for split in SPLITS]
    return {
        "clients": len(federation),
        "names": _digest("\n".join(federation.names).encode()),
        "unseen": _digest("\n".join(sorted(federation.unseen)).encode()),
        "samples": len(federation.x),
        "inputs": _kind(federation.x, federation.pixels),
        "targets": _kind(federation.y),
        "x": _digest_of(federation.stored_inputs()),
        "y": _digest(federation.y.numpy()),
        "split": _digest(*(array for split in splits for array in (split.lengths, split.flat))),
    }


def find_difference(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return what differs between the origin of a saved run and that of the run at hand; None if nothing does."""
    if saved == now:
        return None
    differs = {key for key in now if saved.get(key) != now[key]}
    if "parameters" in differs:
        return f"the module differs: {_first_difference(saved['parameters'], now['parameters'])}"
    if "head" in differs:
        return (
            f"the head differs: it has {now['head']} parameters, and {saved['head']} in the saved run; give the same "
            "head="
        )
    if "weights" in differs:
        return (
            "the initial weights differ: seed torch before you build the module, as in torch.manual_seed(0), or load "
            "the weights that the run began with"
        )
    return _data_difference(saved, now, differs)


def find_data_difference(saved: dict[str, Any], federation: Federation) -> str | None:
    """Return what differs between the data of a saved run and a federation; None if nothing does."""
    now = _describe_data(federation)
    differs = {key for key in now if saved.get(key) != now[key]}
    return _data_difference(saved, now, differs) if differs else None


def _data_difference(saved: dict[str, Any], now: dict[str, Any], differs: set[str]) -> str:
    if "clients" in differs:
        return f"the clients differ: there are {now['clients']}, and {saved['clients']} in the saved run"
    if "names" in differs:
        return "the clients differ: they have other names, or another order"
    if "unseen" in differs:
        return "the clients that are kept out of training differ; give the same unseen= and seed="
    if differs & {"samples", "inputs", "targets"}:
        return f"the data differ: there are {_counted(now)}, and in the saved run {_counted(saved)}"
    if differs & {"x", "y"}:
        what = " and ".join(word for key, word in (("x", "inputs"), ("y", "targets")) if key in differs)
        return f"the data differ: the {what} have other values than in the saved run, in the same number and shape"
    return (
        "the split differs: the samples are the same, but divided otherwise into train, validation and test; give the "
        "same split= and seed="
    )


def legacy_fingerprint(federation: Federation, task: Task) -> str:
    """Return the fingerprint that checkpoints of version 0.1 have: data and split, layout, and weights."""
    return f"{federation.fingerprint(splits=True)} {task.space.fingerprint()} {_digest(task.w0.cpu().numpy())}"


def find_legacy_difference(saved: str, now: str) -> str | None:
    """Return what differs between two fingerprints of version 0.1; None if nothing does."""
    sentences = (
        "the data, their split, or the clients that are kept out of training differ",
        "the module differs: its parameters have other names or shapes, or the head is another one",
        "the initial weights differ: seed torch before you build the module, as in torch.manual_seed(0)",
    )
    found = [text for text, a, b in zip(sentences, saved.split(), now.split(), strict=False) if a != b]
    return next(iter(found), None if saved == now else "the model or the data differ")


def _digest(*parts: np.ndarray | bytes) -> str:
    return _digest_of(parts)


def _digest_of(parts: Iterable[np.ndarray | bytes]) -> str:
    hasher = blake2b(digest_size=8)
    for part in parts:
        hasher.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return hasher.hexdigest()


def _kind(tensor: Tensor, dtype: torch.dtype | None = None) -> list[Any]:
    return [list(tensor.shape[1:]), str(dtype or tensor.dtype).removeprefix("torch.")]


def _counted(origin: dict[str, Any]) -> str:
    kinds = (f"{what} of shape {origin[what][0]} ({origin[what][1]})" for what in ("inputs", "targets"))
    return f"{origin['samples']} samples with {' and '.join(kinds)}"


def _first_difference(saved: list[list[Any]], now: list[list[Any]]) -> str:
    for number, (old, new) in enumerate(zip_longest(saved, now), 1):
        if old != new:
            texts = ["nothing" if p is None else f"{p[0]!r} of shape {p[1]}" for p in (new, old)]
            return f"its parameter number {number} is {texts[0]}, and {texts[1]} in the saved run"
    raise AssertionError("the lists are equal")
