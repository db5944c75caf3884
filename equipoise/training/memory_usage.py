"""Measurement of memory: that of this process, and that of the tensors in a computation."""

import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_memory_mb() -> float:
    """Return the peak memory of this process since the program began, in MiB."""
    try:  # the resource module also counts the memory of the process before it was replaced by this program
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _TensorCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that operators create, for as long as they exist."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise PyTorch imports its compiler here, which takes seconds, although nothing is compiled.
        return False

    def __init__(self) -> None:
        super().__init__()
        self.current, self.peak = 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._add(given.untyped_storage(), 0)  # it existed before
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._add(storage, storage.nbytes())
        return result

    def _add(self, storage: UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.current += size
            self.peak = max(self.peak, self.current)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.current -= size


def peak_tensor_bytes(function: Callable[[], object]) -> int:
    """Return the peak size in bytes of the tensors that `function` creates, without what operators use internally."""
    counter = _TensorCounter()
    with counter:
        kept = function()
    del kept
    return counter.peak
