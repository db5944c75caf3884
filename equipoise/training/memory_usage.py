"""How much memory this process has taken, and how much a computation takes."""

import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_memory_mb() -> float:
    """The most that was in use at once, since the program began."""
    try:  # the resource module also counts what the process had been before it became this program
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _Tensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make, for as long as each of them lives."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else PyTorch imports its compiler here, which takes seconds and is of no use: nothing is compiled."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._note(given.untyped_storage(), 0)  # it was there before
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._note(storage, storage.nbytes())
        return made

    def _note(self, storage: UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak_tensor_bytes(function: Callable[[], object]) -> int:
    """The most bytes that tensors made by `function` took at once; what operators use inside is not counted."""
    tensors = _Tensors()
    with tensors:
        kept = function()
    del kept
    return tensors.most
