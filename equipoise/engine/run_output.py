"""The files that a finished simulation writes into its run folder."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.algorithms.base import Algorithm
from equipoise.algorithms.capabilities import ShowsState
from equipoise.algorithms.local_data import Start
from equipoise.data.federation import Federation
from equipoise.data.statistics import outline
from equipoise.evaluation.sharing import sharing_area
from equipoise.executors.base import ClientJob
from equipoise.state import State, stack
from equipoise.storage import atomic_files, tensor_files
from equipoise.storage.run_folder import FEDERATION, RunFolder


def write_results(
    folder: RunFolder,
    federation: Federation,
    malicious: Collection[str],
    scores: Mapping[str, np.ndarray],
    columns: Sequence[str],
    shown: State | None,
    summary: dict[str, Any],
) -> None:
    """Write clients.csv, federation.json, shown.safetensors and summary.json.

    Args:
        folder: the run folder.
        federation: the clients and their data.
        malicious: names of the malicious clients.
        scores: for each kind of model, one row per client.
        columns: names of the scores.
        shown: what the algorithm shows of the clients' states, if anything.
        summary: the content of summary.json.
    """
    sizes = {name: getattr(federation, name).lengths for name in ("train", "validation", "test")}
    marks = {"unseen": federation.unseen, "malicious": frozenset(malicious)}
    folder.write_clients(federation.names, marks, sizes, dict(scores), columns)
    atomic_files.write_json(folder.path / FEDERATION, outline(federation))
    if shown is not None:
        tensor_files.write_tensors(folder.shown, shown)
    atomic_files.write_json(folder.summary, summary)  # last, so that all other files exist when it does


def sharing_figures(shown: State | None, federation: Federation) -> dict[str, float]:
    """Return how well Λ has found what clients share, if the algorithm shows it and the data are known."""
    inputs = federation.x[0].numel()
    if not federation.shared_inputs or shown is None or "lam" not in shown or shown.lam.shape[-1] != inputs:
        return {}
    return {"sharing_area": sharing_area(shown.lam, federation.shared_inputs)}


def shown_states(algorithm: Algorithm, start: Start, jobs: Iterable[ClientJob]) -> State | None:
    """Return what the algorithm shows of these clients, as they are and as they began; None if it shows nothing."""
    if not isinstance(algorithm, ShowsState):
        return None
    device = start.w0.device
    now = [algorithm.shown_state(job.client.to(device), job.down, start.space) for job in jobs]
    down = algorithm.broadcast(algorithm.init_server(start), 0)
    begun = algorithm.shown_state(algorithm.init_client(start), down, start.space)
    return State(stack(now), **{f"begin.{name}": t for name, t in stack([begun] * len(now)).items()})
