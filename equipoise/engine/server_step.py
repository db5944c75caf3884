"""The step of a server optimizer after `Algorithm.aggregate`, and what it remembers from round to round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm
from equipoise.optimizers.server_optimizer import Memory
from equipoise.state import State

_PREFIX = "server_optimizer."


class ServerStep:
    """Applies the algorithm's server optimizer, if it has one, to the fields of the server's state that are means."""

    def __init__(self, algorithm: Algorithm):
        self.optimizer, self.averaged = algorithm.server_optimizer, algorithm.averaged
        self.memory: Mapping[str, Memory] = {}
        "what the optimizer remembers of each field; replaced by every step and never changed, so it can be restored"

    def __call__(self, before: State, after: State) -> State:
        """Return the server's next state.

        Args:
            before: the state before the round.
            after: what the algorithm made of it.
        """
        if self.optimizer is None:
            return after
        remembered = {name: self.memory.get(name, {}) for name in self.averaged}
        found = {name: self.optimizer.step(before[name], after[name], m) for name, m in remembered.items()}
        self.memory = {name: memory for name, (_, memory) in found.items()}
        return State(after, **{name: x for name, (x, _) in found.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {f"{_PREFIX}{name}.{k}": t for name, memory in self.memory.items() for k, t in memory.items()}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore what a checkpoint saved."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, t in tensors.items():
            if key.startswith(_PREFIX):
                name, _, k = key.removeprefix(_PREFIX).rpartition(".")
                found.setdefault(name, {})[k] = t.to(device)
        self.memory = found
