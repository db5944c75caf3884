"""What a reducer remembers of every client: one row per client, by its number."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from equipoise.state import State

_KNOWN = "known"


class ClientMemory:
    """Rows of the clients in several fields, and which of the clients have one."""

    def __init__(self, memory: State, senders: Sequence[int]):
        """Open the memory for a round.

        Args:
            memory: what was remembered; it is not changed.
            senders: the numbers of the clients whose rows are needed.
        """
        more = max(0, 1 + max(senders) - len(memory[_KNOWN]))  # newcomers have larger numbers
        self.after = State({k: torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for k, t in memory.items()})
        self.places = torch.tensor(senders, device=memory[_KNOWN].device)
        self.known = self.after[_KNOWN][self.places] > 0
        "which of the senders have a row already"
        self.after[_KNOWN][self.places] = 1

    @staticmethod
    def empty(fields: Mapping[str, int], like: State, clients: int) -> State:
        """Return the memory before the first round.

        Args:
            fields: the length of a row in each field of the messages.
            like: a message.
            clients: number of clients.
        """
        rows = {name: like[name].new_zeros(clients, width) for name, width in fields.items()}
        device = next((t.device for t in like.values()), None)
        return State({_KNOWN: torch.zeros(clients, device=device), **{f"row.{k}": t for k, t in rows.items()}})

    def get(self, name: str, low: int, high: int) -> Tensor:
        """Return coordinates low to high of the senders' rows; zeros for those without."""
        return self.after[f"row.{name}"][self.places, low:high]

    def put(self, name: str, low: int, high: int, rows: Tensor) -> Tensor:
        """Set coordinates low to high of the senders' rows; return them as they are kept."""
        field = self.after[f"row.{name}"]
        largest = torch.finfo(field.dtype).max
        kept = rows.clamp(-largest, largest).to(field.dtype)
        field[self.places, low:high] = kept
        return kept
