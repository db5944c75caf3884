"""What a reducer is: one message out of many."""

from abc import ABC, abstractmethod
from typing import Annotated

from pydantic import Field

from equipoise.settings import Settings
from equipoise.state import State, Uploads

Part = Annotated[float, Field(ge=0, lt=1)]


class Reducer(Settings, ABC):
    """How the server makes one message of many: of those that came in the round or, where the algorithm's server
    remembers, of every client's last one. The order in which they come makes no difference.
    """

    @abstractmethod
    def __call__(self, uploads: Uploads) -> State:
        """One message of the same fields and shapes."""
