"""The contract of a reducer, which combines many messages into one."""

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from equipoise.errors import EquipoiseError
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.mixers import MIXERS
from equipoise.reducers.mixing import Mixer
from equipoise.registry import choose, name_of
from equipoise.settings import Settings, shown
from equipoise.state import State, Uploads

Part = Annotated[float, Field(ge=0, lt=1)]


class Reducer(Settings, ABC):
    """A rule by which the server combines many messages into one.

    The messages are those of the round or, if the algorithm's server keeps them, the last one of every client. Their
    order makes no difference.
    """

    needs_origin: ClassVar[bool] = False
    "whether the rule measures messages from what clients began with"
    needs_model: ClassVar[bool] = False
    "whether the rule changes the global model itself, so that messages must be models"

    before: tuple[Mixer, ...] = ()
    'rules that mix messages first, from left to right, such as [{name = "nnm"}]: bucketing, nnm'

    @field_validator("before", mode="before")
    @classmethod
    def _read_mixers(cls, value: Any) -> Any:
        if not isinstance(value, tuple) or not all(isinstance(v, (dict, Mixer)) for v in value):
            raise EquipoiseError(
                f'reducer.before = {shown(value)} is not allowed; it must be a list of tables such as {{name = "nnm"}}'
            )
        return tuple(v if isinstance(v, Mixer) else choose(MIXERS, v, "reducer.before")[1] for v in value)

    def table(self) -> dict[str, Any]:
        found = super().table()
        if not found.pop("before"):
            return found  # as in versions that did not have it
        return {**found, "before": [{"name": name_of(MIXERS, mixer), **mixer.table()} for mixer in self.before]}

    @abstractmethod
    def __call__(self, uploads: Uploads) -> State:
        """Combine the messages into one of the same fields and shapes."""

    @property
    def remembers(self) -> bool:
        """Tell whether the rule, with these settings, remembers anything from one round to the next."""
        return False

    @property
    def trusts(self) -> tuple[str, ...]:
        """Return the names of clients that must be honest for the rule to make sense."""
        return ()

    def memory(self, like: State, clients: int) -> State:
        """Return what the rule remembers before the first round.

        Args:
            like: a message.
            clients: number of clients that train; newcomers have larger numbers.
        """
        return State()

    def apply(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        """Mix the messages of a round, if the settings say so, and combine them; see `reduce`."""
        for mixer in self.before:
            uploads = mixer(uploads, context)
        return self.reduce(uploads, context)

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        """Combine the messages of a round of a run.

        Args:
            uploads: the messages.
            context: what is known besides.

        Returns:
            The combined message, and what the rule remembers from now on.
        """
        return self(uploads), context.memory


class ContextReducer(Reducer):
    """A rule that needs to know more than the messages: their origin, the round, or what it remembers."""

    @abstractmethod
    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]: ...

    def __call__(self, uploads: Uploads) -> State:
        """Combine messages without a run; they are taken as differences, of the first round."""
        memory = self.memory(uploads.like, len(uploads)) if self.remembers else State()
        return self.reduce(uploads, ReductionContext.alone(uploads, memory))[0]
