"""Graphs of tensor operations as shared libraries: compiled ahead of time, cached on disk, called without Python.

A call goes through the C interface that AOTInductor gives its libraries, so the interpreter lock is released for all of
it. torch's own loaders hold the lock.
"""

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.data.cache import cache_folder
from equipoise.storage.atomic_files import digest

_FORMAT = "equipoise-compiled-1"
_OPTIONS = {"cpp.threads": 1}  # a client has one thread, so kernels must not start others
_NOT_IN_C = "aoti_torch_proxy_executor_call_function"  # what generated code calls for operators without a C interface
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class AotLibrary:
    """A loaded library, whose function changes its inputs in place and returns nothing."""

    def __init__(self, path: Path, inputs: int):
        """Load a library.

        Args:
            path: the file.
            inputs: number of tensors that its function takes.
        """
        self.inputs, self.file = inputs, ctypes.CDLL(str(path))
        self.run = self.file.AOTInductorModelContainerRunSingleThreaded
        pointer, count = ctypes.c_void_p, ctypes.c_size_t
        # working memory; inputs and their number; outputs and their number; a stream; operators without a C interface
        self.run.argtypes = [pointer, pointer, count, pointer, count, pointer, pointer]

    def function(self) -> "AotFunction":
        """Return the function for the use of one thread."""
        return AotFunction(self)

    def last_error(self) -> str:
        """Return what went wrong in the last call in this thread."""
        text = ctypes.c_char_p()
        self.file.AOTInductorGetLastError(ctypes.byref(text))
        return (text.value or b"unknown error").decode(errors="replace").splitlines()[0]


class AotFunction:
    """The function of a library, with working memory of its own: one thread at a time may call it."""

    def __init__(self, library: AotLibrary):
        self.library, handle = library, ctypes.c_void_p()
        if library.file.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(handle), ctypes.c_size_t(1), b"cpu", None
        ):
            raise RuntimeError(library.last_error())
        weakref.finalize(self, library.file.AOTInductorModelContainerDelete, handle)
        self.handle = handle
        self.room = (ctypes.c_void_p * library.inputs)()

    def __call__(self, tensors: list[Tensor]) -> None:
        """Call the function with these tensors, of exactly the shapes and strides that it was compiled for."""
        # The call takes over these references to the tensors.
        for i, capsule in enumerate(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)):
            self.room[i] = _pointer(capsule, None)
        if self.library.run(self.handle, self.room, len(tensors), None, 0, None, None):
            raise RuntimeError(self.library.last_error())


class Built(NamedTuple):
    """A library with where it came from."""

    library: AotLibrary
    folder: Path | None
    "the folder in which it is cached, if it is"
    new: bool
    "whether it was compiled just now"


def build_library(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Built:
    """Return a graph as a library, from the cache if the same was compiled before for this machine.

    Args:
        graph: the graph; it returns nothing.
        inputs: tensors of the shapes and strides that it takes.
    """
    base = cache_folder()
    folder, key = None if base is None else base / "compiled", _key(graph, inputs)
    if folder is not None and (found := _read(folder, key, len(inputs))) is not None:
        return Built(found, folder, False)
    with _lock(folder, key):
        if folder is not None and (found := _read(folder, key, len(inputs))) is not None:
            return Built(found, folder, False)  # another process compiled it in the meantime
        with tempfile.TemporaryDirectory(prefix="equipoise-compile-") as place:
            path = _compile(graph, inputs, Path(place))
            kept = folder is not None and _write(folder, key, path)
            return Built(AotLibrary(path, len(inputs)), folder if kept else None, True)


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], place: Path) -> Path:
    """Compile a graph into a library in an empty folder."""
    from torch._inductor import aot_compile  # takes seconds to import

    path = place / "step.so"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        aot_compile(graph, tuple(inputs), options={**_OPTIONS, "aot_inductor.output_path": str(path)})
    if any(_NOT_IN_C in source.read_text(errors="replace") for source in place.rglob("*.cpp")):
        raise RuntimeError("it uses an operator that has no C interface")
    return path


def _key(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> str:
    """Return a hash of everything that the compiled code depends on."""
    shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in inputs]
    known = [_FORMAT, torch.__version__, torch.version.git_version, _compiler(), _processor(), _OPTIONS, shapes]
    hasher = blake2b(f"{known}\n{graph.code}".encode(), digest_size=16)
    for node in graph.graph.nodes:
        if node.op == "get_attr":  # a constant of the model, which becomes part of the library
            value: Any = getattr(graph, node.target)
            hasher.update(f"{node.target} {value.dtype} {tuple(value.shape)}".encode())
            hasher.update(value.detach().contiguous().numpy().data)
    return hasher.hexdigest()


def _compiler() -> str:
    command = shutil.which(os.environ.get("CXX", "g++"))
    if command is None:
        return ""
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]


def _processor() -> str:
    """Return what the processor can do: libraries use all of it, and a cache may be shared by several machines."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return f"{platform.machine()} {line}"
    return f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


@contextmanager
def _lock(folder: Path | None, key: str) -> Iterator[None]:
    """Let one process at a time compile the same graph; without a cache to share, all may."""
    file = None
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (folder / f"{key}.lock").open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _read(folder: Path, key: str, inputs: int) -> AotLibrary | None:
    """Return the library in the cache; one that is damaged, or that others may have written, is not used."""
    for path in folder.glob(f"{key}-*.so"):
        with suppress(OSError):
            status = path.stat()
            mine = status.st_uid == os.getuid() and not status.st_mode & 0o022
            if mine and path.name == f"{key}-{digest(path)}.so":
                return AotLibrary(path, inputs)
    return None


def _write(folder: Path, key: str, path: Path) -> bool:
    """Copy a library into the cache, under a name that contains the digest of its content; tell whether it worked."""
    entry = folder / f"{key}-{digest(path)}.so"
    mine = entry.with_name(f"{entry.name}.{os.getpid()}")
    try:
        shutil.copyfile(path, mine)
        mine.chmod(0o700)
        mine.replace(entry)
    except OSError:  # a cache that cannot be written is no reason to stop
        return False
    finally:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
    return True
