"""What the starter of a process says about the run that it belongs to, read without loading PyTorch."""

import os
import threading
import time

LAUNCHED = "EQUIPOISE_RENDEZVOUS"
"""Environment variable of processes that `equipoise run --processes` started: the address at which they meet."""

LOST = 75
"""Exit code of such a process that ends because another one of its run has ended."""

PARENT = "EQUIPOISE_PARENT"
"""Environment variable of such processes: the number of the process that started them."""


def world_size() -> int:
    """Return the number of processes of the run, as torchrun or `equipoise run --processes` set it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def rank() -> int:
    """Return the number of this process in the run."""
    return int(os.environ.get("RANK", "0"))


def local_world_size() -> int:
    """Return the number of processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def local_rank() -> int:
    """Return the number of this process among those of the run on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if "RANK" in os.environ else 0


def restarts() -> int:
    """Return how often torchrun has restarted the run, after one of its processes had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def exit_with_parent() -> None:
    """Let this process end when the one that started it ends, however that happens."""
    # If it has ended before this is reached, this process has another parent already.
    parent = int(os.environ.get(PARENT, os.getppid()))
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
