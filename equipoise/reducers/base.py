"""The contract of a reducer, which combines many messages into one."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

from pydantic import Field

from equipoise.reducers.context import ReductionContext
from equipoise.settings import Settings
from equipoise.state import State, Uploads

Part = Annotated[float, Field(ge=0, lt=1)]


class Reducer(Settings, ABC):
    """A rule by which the server combines many messages into one.

    The messages are those of the round or, if the algorithm's server keeps them, the last one of every client. Their
    order makes no difference.
    """

    needs_origin: ClassVar[bool] = False
    "whether the rule measures messages from what clients began with"

    @abstractmethod
    def __call__(self, uploads: Uploads) -> State:
        """Combine the messages into one of the same fields and shapes."""

    @property
    def remembers(self) -> bool:
        """Tell whether the rule, with these settings, remembers anything from one round to the next."""
        return False

    def memory(self, like: State, clients: int) -> State:
        """Return what the rule remembers before the first round.

        Args:
            like: a message.
            clients: number of clients that train; newcomers have larger numbers.
        """
        return State()

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
        context = ReductionContext.alone(uploads)
        memory = self.memory(uploads.like, context.clients) if self.remembers else State()
        return self.reduce(uploads, ReductionContext(context.origin, memory, clients=context.clients))[0]
