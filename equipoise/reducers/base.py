"""The contract of a reducer, which combines many messages into one."""

from abc import ABC, abstractmethod
from typing import Annotated

from pydantic import Field

from equipoise.settings import Settings
from equipoise.state import State, Uploads

Part = Annotated[float, Field(ge=0, lt=1)]


class Reducer(Settings, ABC):
    """A rule by which the server combines many messages into one.

    The messages are those of the round or, if the algorithm's server keeps them, the last one of every client. Their
    order makes no difference.
    """

    @abstractmethod
    def __call__(self, uploads: Uploads) -> State:
        """Combine the messages into one of the same fields and shapes."""
