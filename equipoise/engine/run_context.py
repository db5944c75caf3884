"""What callbacks may see of a run and ask of it, in both engines."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.callbacks.base import Line, RunContext
from equipoise.engine.run import Run
from equipoise.errors import EquipoiseError


class EngineContext(RunContext):
    """A view of a run in either engine."""

    def __init__(self, run: Run):
        self._run = run

    @property
    def rounds(self) -> int:
        return self._run.schedule.rounds

    @property
    def done(self) -> int:
        return self._run.done

    @property
    def lines(self) -> Sequence[Line]:
        return copy.deepcopy(self._run.lines)

    @property
    def settings(self) -> Mapping[str, Any]:
        return copy.deepcopy(self._run.callbacks.settings)

    @property
    def folder(self) -> Path | None:
        return None if self._run.folder is None else self._run.folder.path

    @property
    def clients(self) -> Sequence[str]:
        return self._run.training_clients()

    @property
    def metric(self) -> str:
        return self._run.task.metric.name

    @property
    def higher_is_better(self) -> bool:
        return self._run.task.metric.higher_is_better

    @property
    def no_validation(self) -> str:
        return self._run.no_validation()

    def validation_scores(self, kind: str) -> dict[str, float]:
        return self._run.validation_scores(kind)

    def personal_model(self, client: str) -> nn.Module:
        if why := self._run.no_personal_models():
            raise EquipoiseError(f"there is no personal model of {client}: {why}")
        [model] = self._run.personal_models([client])
        return self._run.module_of(model)

    def global_model(self) -> nn.Module | None:
        vector = self._run.algorithm.global_model(self._run.server)
        return None if vector is None else self._run.task.to_module(vector, self._run.global_buffers())

    def not_kept(self, kind: str) -> str:
        if kind == "personal":
            return self._run.no_personal_models()
        if kind != "global":
            return "only personal models and the global model can be kept"
        local = self._run.task.buffer_names and self._run.global_buffers() is None
        return "its buffers (BatchNorm statistics) stay with the clients" if local else ""

    def keep_best(self, kind: str, clients: Sequence[str] = ()) -> None:
        if why := self.not_kept(kind):
            raise EquipoiseError(f"the {kind} model cannot be kept: {why}")
        run = self._run
        if kind == "personal":
            for model in run.personal_models(run.own_clients(clients)):
                run.best.keep(model.who, model.vector, model.buffers, run.done)
            return
        global_model = run.algorithm.global_model(run.server)
        if global_model is None:
            raise EquipoiseError(f"{type(run.algorithm).__name__} has no global model to keep")
        if run.ranks.leader:
            run.best.keep(run.best.global_row, global_model, run.global_buffers(), run.done)

    def save_checkpoint(self) -> None:
        self._run.checkpoint_wanted = True  # after the round is logged, so that none of its lines is lost

    def report(self, text: str) -> None:
        self._run.warn(text)

    def stop(self, reason: str) -> None:
        if self._run.callbacks.beginning:
            raise EquipoiseError("a run cannot stop before its first round; call stop() in on_round_end")
        if self._run.stopped is None:
            self._run.stopped = reason
