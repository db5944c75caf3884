"""How much memory this process has taken, and how much a computation takes."""

import resource
from collections.abc import Callable
from pathlib import Path

import torch


def peak_memory_mb() -> float:
    """The most that was in use at once, since the program began."""
    try:  # the resource module also counts what the process had been before it became this program
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_tensor_bytes(function: Callable[[], object]) -> int:
    """The most bytes that tensors made by `function` took at once while it ran, as torch's allocator saw it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = function()
    del kept
    results = profiler.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
