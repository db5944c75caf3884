"""Comparison of two run folders, byte by byte apart from times."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from equipoise.engine.client_store import ClientStore
from equipoise.state import State

TIMES = ("seconds", "samples_per_second", "peak_memory_mb")


def states(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the newest saved state of the server and of every client, wherever they lie in files."""
    newest = json.loads(max((folder / "checkpoint").glob("round-*.json")).read_text())
    tensors = load_file(folder / "checkpoint" / newest["server"])
    found = {"server": {k: t for k, t in tensors.items() if not k.startswith(("store.", "best."))}}
    for group, prefix in (("store", "clients"), ("best", "best")):
        if group in newest:
            store = ClientStore(0, State(), folder / "checkpoint", prefix=prefix)
            table = {k.removeprefix(f"{group}."): t for k, t in tensors.items() if k.startswith(f"{group}.")}
            store.restore(table, newest[group]["written"], {})
            found |= {f"{group} {who}": store.get(who) for who in range(len(store.segment))}
    return found


def assert_same(one: Path, other: Path) -> None:
    names = ("metrics.jsonl", "clients.csv", "federation.json", "shown.safetensors", "forecast.csv")
    for name in (*names, "best/personal.safetensors"):
        assert (one / name).exists() == (other / name).exists(), (one, name)
        assert not (one / name).exists() or (one / name).read_bytes() == (other / name).read_bytes(), (one, name)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    for summary in summaries:
        for key in TIMES:
            summary.pop(key)
    assert summaries[0] == summaries[1]
    here, there = states(one), states(other)
    assert here.keys() == there.keys()
    for owner, tensors in here.items():
        assert tensors.keys() == there[owner].keys()
        for name, t in tensors.items():
            assert torch.equal(t.nan_to_num(), there[owner][name].nan_to_num()), (owner, name)
