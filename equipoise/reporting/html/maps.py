"""Heat maps: labels of each client, parameters that Learn2pFed shares, similarity of layers."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from equipoise.reporting.html.chart import Chart, Method, chart, plain, short
from equipoise.storage import atomic_files
from equipoise.storage.run_folder import CKA, FEDERATION, SHOWN
from equipoise.storage.run_index import FinishedRun

_SCALE: dict[str, Any] = {"colorscale": "Viridis", "type": "heatmap"}
_MOST = 200
"""Largest number of rows and columns of a map."""
_NAMED = 30
"""Largest number of clients whose names fit."""


def federation(runs: Iterable[FinishedRun]) -> Chart | None:
    """Return the map of labels over clients, from the first run that recorded it."""
    path = next((p for run in runs if (p := run.path / FEDERATION).exists()), None)
    if path is None:
        return None
    found = atomic_files.read_json(path)
    counts = found.get("labels")
    if not counts:
        return None
    names = [plain(name) for name in found["names"]]
    trace = {
        **_SCALE,
        "z": [[n / max(1, sum(row)) for n in row] for row in counts],
        "y": names,
        "text": [[str(n) for n in row] for row in counts],
        "hovertemplate": "%{y}, label %{x}: %{text} samples<extra></extra>",
        "colorbar": {"title": {"text": "share"}},
    }
    axis: dict[str, Any] = {"title": {"text": "client"}, "autorange": "reversed", "type": "category"}
    if len(names) < _NAMED:
        axis |= {"tickvals": names, "ticktext": [plain(short(name, 16)) for name in found["names"]]}
    note = f"{found['clients']} clients" + ("" if found["clients"] == len(names) else f", {len(names)} of them shown")
    title = "The federation: labels of each client"
    return chart("federation", title, f"{note}. First seed.", [trace], "label", "client", yaxis=axis)


def learned(methods: Sequence[Method]) -> list[Chart]:
    """Return maps of how strongly each client's parameters are tied to the others', as Learn2pFed learned it."""
    from safetensors.numpy import load_file

    charts = []
    for method in methods:
        path = method.runs[0].path / SHOWN
        if not path.exists():
            continue
        lam = load_file(path).get("lam")
        if lam is None:
            continue
        lam = lam.reshape(len(lam), -1)[:_MOST, :_MOST]
        trace = {
            **_SCALE,
            "z": np.log10(np.maximum(lam, 1e-12)).tolist(),
            "text": [[f"{v:.3g}" for v in row] for row in lam.tolist()],
            "hovertemplate": "client %{y}, parameter %{x}: Λ = %{text}<extra></extra>",
            "colorbar": {"title": {"text": "log₁₀ Λ"}},
            "meta": {"method": method.number},
        }
        note = (
            f"Large: tied to the other clients; small: the client's own. First seed, at most {_MOST} rows and columns."
        )
        title = f"What {method.name} shares"
        charts.append(chart(f"learned-{method.number}", title, note, [trace], "parameter", "client"))
    return charts


def similarity(methods: Sequence[Method]) -> list[Chart]:
    """Return maps of the CKA that `equipoise cka` wrote into the folders of these runs."""
    charts = []
    for method in methods:
        path = method.runs[0].path / CKA
        if not path.exists():
            continue
        found = atomic_files.read_json(path)
        trace = {
            **_SCALE,
            "z": found["cka"],
            "x": [plain(pair) for pair in found["pairs"]],
            "y": [plain(layer) for layer in found["layers"]],
            "zmin": 0,
            "zmax": 1,
            "hovertemplate": "%{y}, %{x}: %{z:.3f}<extra></extra>",
            "colorbar": {"title": {"text": "CKA"}},
            "meta": {"method": method.number},
        }
        note = f"Between {found['between']}, after round {found['rounds']}, on {found['samples']} test samples."
        more = {"yaxis": {"autorange": "reversed", "type": "category"}, "xaxis": {"type": "category"}}
        title = f"Similarity of layers: {method.name}"
        charts.append(chart(f"cka-{method.number}", title, note, [trace], "client", "layer", **more))
    return charts
