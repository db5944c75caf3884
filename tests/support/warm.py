"""A program like `flwr-clientapp`, small and installed for tests only, with its real command and warm clients."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equipoise
from equipoise.flower.warm.launch import WarmFolder
from tests.support.waiting import LIMIT, start, until

NAME = "fake-clientapp"
PROGRAM = """
import atexit, importlib, json, os, random, signal, sys, threading, time


def end(number, frame):
    sys.exit(7)


def main():
    what, *more = sys.argv[1:]
    warm = "equipoise.flower.warm.child" in sys.modules
    if what == "facts":
        umask = os.umask(0)
        facts = {"warm": warm, "argv": sys.argv, "cwd": os.getcwd(), "mine": os.environ.get("MINE"), "umask": umask}
        print(json.dumps({**facts, "stdin": sys.stdin.read()}))
        print("to stderr", file=sys.stderr)
    elif what == "exit":
        sys.exit(int(more[0]))
    elif what == "text":
        sys.exit("some text")
    elif what == "raise":
        raise ZeroDivisionError("in the program")
    elif what == "random":
        import numpy, torch
        print(json.dumps([random.random(), numpy.random.rand(), torch.rand(()).item()]))
    elif what == "import":
        sys.path.insert(0, os.getcwd())
        print(importlib.import_module("app_code").VALUE, warm)
    elif what == "library":
        import fake_library
        print(fake_library.VALUE, warm)
    elif what == "work":
        signal.signal(signal.SIGTERM, end)
        print(os.getpid(), flush=True)
        while not os.path.exists(more[0]):
            time.sleep(0.01)
        sys.exit(5)
    elif what == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
        print(os.getpid(), flush=True)
        while True:
            time.sleep(1)
    elif what == "write":
        with open(more[0], "w") as file:
            file.write(str(warm))
    elif what == "late":
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.1), print("in a thread"))).start()
"""


@dataclass
class Installed:
    """The program, installed in a folder, and a folder for its warm clients."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        site, bin = self.root / "site", self.root / "base" / "bin"
        metadata = site / "fake-1.0.dist-info"
        for folder in (metadata, bin, self.root / "cwd"):
            folder.mkdir(parents=True)
        (site / "fake_program.py").write_text(PROGRAM)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[console_scripts]\n{NAME} = fake_program:main\n")
        real = bin / NAME
        real.write_text(f"#!{sys.executable}\nimport sys\nfrom fake_program import main\nsys.exit(main())\n")
        real.chmod(0o755)
        self.folder = WarmFolder(self.root / "warm", NAME)
        self.folder.prepare()
        package = str(Path(equipoise.__file__).parent.parent)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(bin), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(site), package]),
            "PYTHONUSERBASE": str(self.root / "base"),
            "PYTHONDONTWRITEBYTECODE": "1",  # a source that is written twice within a second is compiled twice
        }
        self.folder.put_on_path(self.environment)

    def resident(self, *preloaded: str, **options: Any) -> "subprocess.Popen[str]":
        """Start the resident process; it accepts requests when this returns."""
        arguments = [x for name in preloaded or ("json",) for x in ("--preload", name)]
        command = self.folder.resident("--command", NAME, *arguments)
        with (self.root / "log").open("a") as log:
            process = start(command, env=self.environment, stderr=log, **options)
        until((self.folder.path / "socket").exists, process)
        return process

    def log(self) -> str:
        """Return what the resident processes have logged."""
        return (self.root / "log").read_text()

    def start(self, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
        """Start the program as a SuperNode does: by its name."""
        pipes = dict.fromkeys(("stdout", "stderr", "stdin"), subprocess.PIPE)
        # Popen looks for a program in the PATH of this process, so it is found here.
        command = [self.folder.bin / NAME, *arguments]
        return start(command, **{"env": self.environment, "cwd": self.root / "cwd", **pipes, **options})

    def call(self, *arguments: object, send: str = "", **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run the program to its end."""
        process = self.start(*arguments, **options)
        output, errors = process.communicate(send, timeout=LIMIT)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
