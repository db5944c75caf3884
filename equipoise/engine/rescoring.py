"""Scoring of the models that an algorithm makes from the training of another run, without training again."""

import time
from typing import Any

from equipoise.engine.run_context import EngineContext
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.storage.model_kinds import KINDS


def rescore(run: Simulation, lines: list[dict[str, Any]]) -> None:
    """Score the models that the run's algorithm makes from the training of another run.

    Scores of earlier rounds are the other run's, except those of the global model, which is the same.

    Args:
        run: a run whose folder holds the newest checkpoint of the other run.
        lines: the other run's log.
    """
    assert run.folder is not None
    if run.restore() is None or run.done != run.schedule.rounds:
        raise EquipoiseError(f"{run.folder.path} has no checkpoint of round {run.schedule.rounds} to score")
    run.scores, run.rescored = run.new_scores(), True
    began = time.perf_counter()
    try:
        run.score()
    finally:
        run.close()
    run.counters.seconds += time.perf_counter() - began
    own = [kind for kind in KINDS if kind != "global"]
    run.callbacks.on_run_begin(EngineContext(run))
    for line in lines:
        kept = {k: v for k, v in line.items() if k not in own}
        scored = run.scores.training.board().summary() if line["round"] == run.done else {}
        run.log(kept | scored, run.timing(line["round"], 0.0, 0.0))
    run.save_checkpoint()
    run.finish()
