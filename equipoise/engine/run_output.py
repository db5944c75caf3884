"""Write what a finished simulation leaves in its run folder."""

from typing import TYPE_CHECKING

from equipoise.algorithms.capabilities import ShowsState
from equipoise.data.statistics import outline
from equipoise.state import State, stack
from equipoise.storage import atomic_files, tensor_files
from equipoise.storage.run_folder import FEDERATION

if TYPE_CHECKING:
    from equipoise.engine.simulation import Simulation


def write_results(run: "Simulation") -> None:
    """Write clients.csv, federation.json, shown.safetensors and summary.json."""
    if run.folder is None:
        return
    federation = run.federation
    sizes = {name: getattr(federation, name).lengths for name in ("train", "validation", "test")}
    marks = {"unseen": federation.unseen, "malicious": run.pipeline.malicious}
    run.folder.write_clients(federation.names, marks, sizes, run.scores.tables())
    atomic_files.write_json(run.folder.path / FEDERATION, outline(federation))
    if isinstance(run.algorithm, ShowsState):
        tensor_files.write_tensors(run.folder.shown, _shown_states(run, run.algorithm))
    summary = run.summary()
    atomic_files.write_json(run.folder.summary, summary)  # last: whoever sees it finds everything else
    run.callback.on_run_end(summary)


def _shown_states(run: "Simulation", shows: ShowsState) -> State:
    """Return what the algorithm shows of the clients that trained, as they are and as they began."""
    algorithm, space = run.algorithm, run.task.space
    jobs = map(run.job, sorted(run.training))
    now = stack([shows.shown_state(job.client, job.down, space) for job in jobs])
    down = algorithm.broadcast(algorithm.init_server(run.start), 0)
    begun = stack([shows.shown_state(algorithm.init_client(run.start), down, space)] * len(run.training))
    return State(now, **{f"begin.{name}": t for name, t in begun.items()})
