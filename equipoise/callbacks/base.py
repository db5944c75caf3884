"""The interface of callbacks: what is called during a run, and what it may see and do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from equipoise.errors import EquipoiseError
from equipoise.settings import Settings, nearest

Line = dict[str, Any]
"""A line of metrics.jsonl."""


class RunContext:
    """What a callback may see of the run that it is called by; both engines provide all of it.

    A view of a run in another process provides a part; the rest is not implemented there.
    """

    @property
    def rounds(self) -> int:
        """Return the planned number of rounds."""
        raise NotImplementedError

    @property
    def done(self) -> int:
        """Return the number of finished rounds."""
        raise NotImplementedError

    @property
    def lines(self) -> Sequence[Line]:
        """Return the lines of metrics.jsonl so far; in a resumed run those of its earlier rounds too."""
        raise NotImplementedError

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return all settings of the run, as in run.toml."""
        raise NotImplementedError

    @property
    def folder(self) -> Path | None:
        """Return the run folder; None if nothing is written."""
        raise NotImplementedError

    @property
    def clients(self) -> Sequence[str]:
        """Return the names of the clients that train, as far as they are known."""
        raise NotImplementedError

    @property
    def metric(self) -> str:
        """Return the name of the metric; its mean on validation samples is `line[KIND]["validation_METRIC"]`."""
        raise NotImplementedError

    @property
    def higher_is_better(self) -> bool:
        """Tell whether higher values of the metric are better."""
        raise NotImplementedError

    @property
    def no_validation(self) -> str:
        """Return why no model can be scored on validation samples, in one sentence; empty if they can."""
        raise NotImplementedError

    def validation_scores(self, kind: str) -> dict[str, float]:
        """Return the last scores of the clients that have validation samples and are not malicious, by name.

        Args:
            kind: the kind of model: "personal", "consensus", "global" or "hybrid".
        """
        raise NotImplementedError

    def personal_model(self, client: str) -> Any:
        """Return the current personal model of a client as a module; a deployment has none of them."""
        raise NotImplementedError

    def global_model(self) -> Any:
        """Return the current global model as a module; None if the algorithm has none."""
        raise NotImplementedError

    def not_kept(self, kind: str) -> str:
        """Return why `keep_best` cannot keep models of a kind, in one sentence; empty if it can."""
        raise NotImplementedError

    def keep_best(self, kind: str, clients: Sequence[str] = ()) -> None:
        """Keep current models as the best ones so far, in place of those kept before.

        They are part of every checkpoint, and in the folder best/ once the run is over.

        Args:
            kind: "personal" or "global".
            clients: the clients whose personal models are kept.
        """
        raise NotImplementedError

    def save_checkpoint(self) -> None:
        """Write a checkpoint once the round is logged; without a run folder nothing is written."""
        raise NotImplementedError

    def report(self, text: str) -> None:
        """Show a message to the user."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """End the run properly after the current round; the first reason counts."""
        raise NotImplementedError


class Callback(Settings):
    """Is called during a run; this base class does nothing.

    Annotated attributes are settings, which are checked and can be given in TOML. All other attributes are state, which
    belongs into `on_run_begin`. A resumed run calls it again, with the earlier rounds in `self.run.lines`; what cannot
    be computed from these lines is saved with the checkpoints by `state_dict` and `load_state_dict`.
    """

    model_config = ConfigDict(frozen=False)
    affects_results: ClassVar[bool] = True
    """Whether it may change what a run returns or writes.

    Such callbacks are called before the line of a round is written, and cannot be changed when a run is resumed.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuse methods that look like hooks and are none, because they would never be called."""
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                hooks = [hook for hook in dir(Callback) if hook.startswith("on_")]
                raise EquipoiseError(f"{cls.__name__}.{name} is no hook of a callback{nearest(name, hooks)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            raise EquipoiseError(f"{type(self).__name__}.{name} is a setting and cannot change during a run")
        object.__setattr__(self, name, value)

    @property
    def run(self) -> RunContext:
        """Return the run that calls this callback."""
        context: RunContext | None = self.__dict__.get("_context")
        if context is None:
            raise EquipoiseError(f"{type(self).__name__} belongs to no run yet; `self.run` exists from on_run_begin on")
        return context

    def attach(self, run: RunContext) -> None:
        """Set the run that calls this callback from now on."""
        self._context = run

    def stop(self, reason: str) -> None:
        """End the run after the current round, which is scored, saved and summarized like a last round.

        Args:
            reason: why, in a few words; it is shown to the user and written to summary.json.
        """
        if not self.affects_results:
            raise EquipoiseError(f"{type(self).__name__} says affects_results = False, so it cannot stop a run")
        self.run.stop(reason)

    def on_data_progress(self, done: int, total: int) -> None:
        """Handle progress in decoding the data, before the run begins: `done` of `total` parts."""

    def on_run_begin(self) -> None:
        """Handle the start of a run, also of one that is resumed."""

    def on_evaluation(self, line: Line) -> None:
        """Handle the scores of the models of a round.

        Args:
            line: the line of the round, with the figures of each kind of model.
        """

    def on_round_end(self, line: Line) -> None:
        """Handle the end of a round.

        Args:
            line: its line in metrics.jsonl.
        """

    def on_message(self, text: str) -> None:
        """Handle a message for the user: a warning or other news, in one sentence."""

    def on_stop(self, text: str) -> None:
        """Handle the news that a callback stopped the run, in one sentence; by default a message like others."""
        self.on_message(text)

    def on_run_end(self, summary: dict[str, Any]) -> None:
        """Handle the end of the run; `summary` is the content of summary.json."""

    def on_interrupt(self, failed: bool) -> None:
        """Handle the end of a run that was stopped by the user or failed; it may be resumed later."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called after `on_run_begin` of a resumed run."""
