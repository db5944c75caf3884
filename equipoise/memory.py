"""How much memory this process has taken."""

import resource
from pathlib import Path


def peak_memory_mb() -> float:
    """The most that was in use at once, since the program began."""
    try:  # the resource module also counts what the process had been before it became this program
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
