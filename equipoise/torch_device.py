"""The device that a run computes on: which one, what it can do, and determinism of its kernels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from equipoise.errors import EquipoiseError

CPU = torch.device("cpu")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_NO_FLOAT64 = frozenset({"mps"})
_SPARE = 0.5  # fraction of a device's free memory that data may take; the rest is for models and what they compute


def choose_device(name: str, dtype: torch.dtype = torch.float32, process: int = 0) -> torch.device:
    """Return the device that a setting names, or raise an error if it cannot be used.

    Args:
        name: a device as torch names it, such as "cuda:1"; or "auto", an accelerator if there is one, else the CPU.
        dtype: number format of the run's parameters.
        process: number of this process among those on the machine; where the name has no number, they take turns.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or (dtype == torch.float64 and found.type in _NO_FLOAT64):
            return CPU
        name = str(found)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EquipoiseError(
            f"engine.device = {name!r} is not a device of PyTorch; it must be 'auto', 'cpu', 'cuda', 'cuda:1', 'mps' "
            "or another name that torch.device takes"
        ) from None
    if dtype == torch.float64 and device.type in _NO_FLOAT64:
        raise EquipoiseError(
            f"engine.device = {name!r} does not compute in float64; use engine.precision = 'float32', or the CPU"
        )
    if process and device.index is None and is_accelerator(device):
        device = torch.device(device.type, process % max(1, torch.get_device_module(device).device_count()))
    try:
        return torch.device(*_place(torch.ones(1, device=device)))
    except Exception as error:  # what a missing driver, a wrong index or a build without the device raises differs
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EquipoiseError(
            f"engine.device = {name!r} is not available here ({text}); use 'auto', which takes an accelerator if "
            "there is one"
        ) from None


def _place(tried: Tensor) -> tuple[str, int] | tuple[str]:
    """Return where a tensor is; reading it fails on devices that hold no numbers (meta)."""
    tried.item()
    return (tried.device.type,) if tried.device.index is None else (tried.device.type, tried.device.index)


def is_accelerator(device: torch.device) -> bool:
    """Tell whether a device is another one than the CPU."""
    return device.type != "cpu"


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the number format in which long sums are taken: float64, where the device has it."""
    return torch.float32 if device.type in _NO_FLOAT64 else torch.float64


def widened(t: Tensor) -> Tensor:
    """Return a tensor in the number format in which long sums are taken."""
    return t.to(wide_dtype(t.device))


def has_room(device: torch.device, size: int) -> bool:
    """Tell whether data of this size in bytes fit on a device beside the models; if that is not known, they do."""
    try:
        free, _ = torch.accelerator.get_memory_info(device)
    except Exception:  # devices that do not tell raise different errors
        return True
    return size <= _SPARE * free


def random_generator(device: torch.device) -> torch.Generator:
    """Return a random generator on the device; one on the CPU where the device has none."""
    try:
        return torch.Generator(device=device)
    except (RuntimeError, NotImplementedError):
        return torch.Generator()


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of torch's global random streams on the CPU and on the device, as far as it has one."""
    states = [torch.random.get_rng_state()]
    if is_accelerator(device) and hasattr(module := torch.get_device_module(device), "get_rng_state"):
        states.append(module.get_rng_state() if device.index is None else module.get_rng_state(device))
    return states


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside operators, so that large tensors are added up in one order on all machines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def forked_random(device: torch.device) -> Iterator[None]:
    """Leave torch's global random streams, on the CPU and on the device, as they were."""
    before = random_state(device)
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        for state in before[1:]:
            module = torch.get_device_module(device)
            module.set_rng_state(state) if device.index is None else module.set_rng_state(state, device)


@contextmanager
def deterministic_kernels(device: torch.device, wanted: bool) -> Iterator[None]:
    """Choose deterministic kernels on an accelerator within the context; torch warns where there are none.

    On the CPU nothing changes: what this library uses is deterministic there.

    Args:
        device: where the kernels run.
        wanted: whether deterministic kernels are wanted.
    """
    if not (wanted and is_accelerator(device)):
        yield
        return
    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        os.environ.get(_CUBLAS),
        memory.fill_uninitialized_memory,
    )
    # cuBLAS reads it once, at its first call.
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic, cudnn.benchmark = True, False
    memory.fill_uninitialized_memory = False  # nothing here reads what was not written, and filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = before[2], before[3]
        memory.fill_uninitialized_memory = before[5]
        if before[4] is None:
            os.environ.pop(_CUBLAS, None)
