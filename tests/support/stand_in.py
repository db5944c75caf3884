"""A stand-in for an accelerator, with which device support is tested where there is none.

It is a device of PyTorch named "standin" (stand_in.cpp): its tensors lie in the memory of the host, but mix with those
of the CPU as little as a GPU's. It is used by its name only: for `auto` it is not available.
"""

import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICE = "standin"
_NEEDED = "EQUIPOISE_NEEDS_STAND_IN"
_NAME = "equipoise_stand_in"


class _Module:
    """What torch asks of the module of a device."""

    # Nothing but its name selects it: to code that looks for accelerators there is none.
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)


def _why_not() -> str | None:
    beside = str(Path(sys.executable).parent)  # where pip installs ninja; torch looks for it in the PATH
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
    missing = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    return f"the stand-in for an accelerator needs {' and '.join(missing)} to be built" if missing else None


@cache
def load() -> Any:
    """Build the stand-in, which takes a while once, and register it with torch, for the rest of this process."""
    from torch.utils.backend_registration import _DummyPrivateUse1Hook
    from torch.utils.cpp_extension import get_default_build_root
    from torch.utils.cpp_extension import load as build

    # Autograd starts its threads at the first backward pass. If that comes first, there is none for this device, and
    # no thread is left over when the process ends.
    torch.ones(1, requires_grad=True).sum().backward()
    source, folder = Path(__file__).with_name("stand_in.cpp"), Path(get_default_build_root(), _NAME)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "builder").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when its process ends, in whatever way
        # So nobody builds now, and torch's own lock is one that a killed build left: torch would wait for it for ever.
        (folder / "lock").unlink(missing_ok=True)
        built = build(_NAME, [str(source)], extra_cflags=["-O1"], build_directory=str(folder))
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _Module)
    torch._C._acc.register_python_privateuseone_hook(_DummyPrivateUse1Hook())
    return built


@contextmanager
def in_this_thread(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let backward passes run in the threads that call them, in this thread and in those that it starts."""
    run = threading.Thread.run

    def run_patched(thread: threading.Thread) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            run(thread)

    patch.setattr(threading.Thread, "run", run_patched)
    with torch.autograd.set_multithreading_enabled(False):
        yield


def counts() -> dict[str, int]:
    """Return how often numbers went from the host to the device and back, were read, or had to be waited for."""
    return dict(load().counts())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the stand-in device."""
    if (why := _why_not()) is not None:
        if os.environ.get(_NEEDED):
            pytest.fail(why)
        pytest.skip(why)
    load()
    with in_this_thread(monkeypatch):
        yield DEVICE
