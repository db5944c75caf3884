"""Keeping the best models of a run, chosen by their scores on validation samples."""

from math import isnan, nan
from typing import Any, Literal

from equipoise.callbacks.base import Callback, Line
from equipoise.callbacks.early_stopping import has_scores, validation_score
from equipoise.errors import EquipoiseError


class BestModel(Callback):
    """Keeps the best models by validation: every client's best personal model, and the best global model."""

    model: Literal["personal", "global"] | None = None
    "kind of model that is kept; if left out, both, as far as the method has them"

    def on_run_begin(self) -> None:
        if self.run.no_validation:
            raise EquipoiseError(f"best-model needs scores on validation samples: {self.run.no_validation}")
        refused = {kind: why for kind in ("personal", "global") if (why := self.run.not_kept(kind))}
        wanted = ("personal", "global") if self.model is None else (self.model,)
        self.kinds = [kind for kind in wanted if kind not in refused]
        if not self.kinds:
            raise EquipoiseError(f"best-model cannot keep the {wanted[0]} model: {refused[wanted[0]]}")
        if len(self.kinds) < len(wanted):
            self.run.report(f"best-model keeps the {self.kinds[0]} model only: {next(iter(refused.values()))}")
        self.personal: dict[str, tuple[float | None, int]] = {}
        "score and round of every client's best personal model; without validation samples the newest is the best"
        self.shared: tuple[float, int] | None = None
        "score and round of the best global model"

    def on_evaluation(self, line: Line) -> None:
        if "personal" in self.kinds and line.get("personal"):
            self._keep_personal(line["round"])
        elif self.model == "personal" and has_scores(line):
            raise EquipoiseError("best-model keeps personal models, but this method has none; say model = 'global'")
        if "global" in self.kinds and line.get("global"):
            score = validation_score(line, "global", self.run.metric)
            if score is not None and (self.shared is None or self._better(score, self.shared[0])):
                self.run.keep_best("global")
                self.shared = score, line["round"]
        elif self.model == "global" and has_scores(line):
            raise EquipoiseError("best-model keeps the global model, but this method has none; say model = 'personal'")

    def _keep_personal(self, round: int) -> None:
        scores = self.run.validation_scores("personal")
        improved: dict[str, float | None] = {}
        for name in self.run.clients:
            score, best = scores.get(name, nan), self.personal.get(name, (None, 0))[0]
            if isnan(score):
                if best is None:
                    improved[name] = None
            elif best is None or self._better(score, best):
                improved[name] = score
        if improved:
            self.run.keep_best("personal", list(improved))
            self.personal |= {name: (score, round) for name, score in improved.items()}

    def _better(self, score: float, best: float) -> bool:
        return score > best if self.run.higher_is_better else score < best

    def state_dict(self) -> dict[str, Any]:
        return {"personal": self.personal, "global": self.shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.personal = {name: (score, round) for name, (score, round) in state["personal"].items()}
        self.shared = None if state["global"] is None else (state["global"][0], state["global"][1])
