"""Early stopping: a run ends when its validation score does not improve any more."""

from typing import Any, Literal

from equipoise.callbacks.base import Callback, Line
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, NonNegative
from equipoise.storage.model_kinds import KINDS


class EarlyStopping(Callback):
    """Ends the run when the mean score on validation samples stops improving."""

    model: Literal["personal", "global", "hybrid", "consensus"] | None = None
    "kind of model that is watched; if left out, personal models, or the global one where there are none"
    patience: Count = 5
    "number of evaluations in a row without an improvement after which the run ends"
    min_delta: NonNegative = 0.0
    "least improvement over the best score that counts as one"

    def on_run_begin(self) -> None:
        if self.run.no_validation:
            raise EquipoiseError(f"early-stopping needs scores on validation samples: {self.run.no_validation}")
        self.best: float | None = None
        self.best_round, self.waited = 0, 0

    def on_evaluation(self, line: Line) -> None:
        if not has_scores(line):
            return
        kind = watched_kind(line, self.model, "early-stopping")
        if validation_key(self.run.metric) not in line[kind]:
            return
        score = validation_score(line, kind, self.run.metric)
        if self._improves(score):
            self.best, self.best_round, self.waited = score, line["round"], 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "no round has a score" if self.best is None else f"the best was {self.best:.4g}"
            since = "" if self.best is None else f" in round {self.best_round}"
            self.stop(
                f"early stopping, as the {kind} model's {self.run.metric} on validation samples did not improve in "
                f"{self.waited} evaluation{'s' if self.waited > 1 else ''} ({best}{since})"
            )

    def _improves(self, score: float | None) -> bool:
        if score is None or self.best is None:
            return score is not None
        gain = score - self.best if self.run.higher_is_better else self.best - score
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_round": self.best_round, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_round, self.waited = state["best"], state["best_round"], state["waited"]


def watched_kind(line: Line, wanted: str | None, who: str) -> str:
    """Return the kind of model to watch, or raise an error if the run has none of that kind.

    Args:
        line: a line with scores.
        wanted: the kind that the user named; None for the personal model or, if there is none, the global one.
        who: name of the callback, for error messages.
    """
    there = [kind for kind in KINDS if line.get(kind)]
    if wanted is None:
        wanted = "global" if "personal" not in there and "global" in there else "personal"
    if wanted not in there:
        raise EquipoiseError(f"{who} watches the {wanted} model, but this run has scores of: {', '.join(there) or '-'}")
    return wanted


def has_scores(line: Line) -> bool:
    """Tell whether a line has scores; in a deployment, it may be that no client reported any this time."""
    return any(line.get(kind) for kind in KINDS)


def validation_key(metric: str) -> str:
    """Return the name of a metric's mean on validation samples in a line."""
    return f"validation_{metric}"


def validation_score(line: Line, kind: str, metric: str) -> float | None:
    """Return the mean score of a kind of model on validation samples; None if it is NaN or was not reported.

    Args:
        line: a line with scores.
        kind: the kind of model.
        metric: name of the metric.
    """
    score: float | None = line[kind].get(validation_key(metric))
    return score
