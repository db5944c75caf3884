"""Try random TOML files, data files, messages, models and checkpoints for as long as there is time.

    python benchmarks/fuzz.py [--minutes 30] [--seed S] [--only models,toml] [--out FILE.json] [--keep FOLDER]
    python benchmarks/fuzz.py --only models --seed S --case N

Every case either works or is refused with one short sentence; another error, a crash, a hang (`--limit` seconds) or a
need for more than `--memory` MB is a failure. The targets are those of tests/support/fuzzing.py and take turns, each in
a process of its own with a limit on its address space. The files of cases that fail are kept in a folder with the error
and the command that repeats the case. Ctrl-C ends the work with the same table. The exit code is 1 if a case failed.
"""

import argparse
import json
import os
import platform
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests.support, also where the package is installed elsewhere
OUT = ROOT / "docs" / "benchmarks" / "fuzz.json"
READY, ACCEPTED, REFUSED, FAILED = "ready", "accepted", "refused", "failed"
START = 300  # seconds that a process may need to import everything and to prepare its files
GRACE = 20  # seconds after the limit of a case, after which its process is killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="how long to try")
    parser.add_argument("--seed", type=int, help="seed of all cases; by default another one every time")
    parser.add_argument("--only", default="", help="targets, or beginnings of their names, separated by commas")
    parser.add_argument("--case", type=int, help="repeat this case only, in this process, with its traceback")
    parser.add_argument("--turn", type=float, default=30, help="seconds of one target's turn")
    parser.add_argument("--limit", type=float, default=20, help="seconds of one case")
    parser.add_argument("--memory", type=int, default=2048, help="MB that cases may need besides what is loaded")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for cases that fail")
    parser.add_argument("--out", type=Path, default=OUT, help="file for the counts")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32)
    if options.case is not None:
        return repeat(options)
    sys.exit(Fuzzing(options).run())


def chosen(only: str) -> list[str]:
    """Return the names of the targets that are wanted."""
    from tests.support.fuzzing import TARGETS

    wanted = [word.strip().lower() for word in only.split(",") if word.strip()]
    names = [name for name in TARGETS if not wanted or any(name.startswith(word) for word in wanted)]
    if not names:
        raise SystemExit(f"there is no target {only}; there are {', '.join(TARGETS)}")
    return names


def repeat(options: argparse.Namespace) -> None:
    """Run one case again and keep its files."""
    from tests.support.fuzzing import run_case, source_of

    [target] = chosen(options.only)
    folder = options.keep / f"{target}-{options.seed}-{options.case}-again"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"the files of the case are in {folder}")
    done = run_case(target, source_of(options.seed, target, options.case), folder, options.limit)
    print(ACCEPTED if done else REFUSED)


def work(options: argparse.Namespace) -> None:
    """Run the cases of one target until the turn is over; print one line per case."""
    import torch

    from tests.support.fuzzing import run_case, source_of

    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="equipoise-fuzz-"))
    target, number = options.work, options.first
    with suppress(BaseException):  # files that cases begin with are prepared before memory is limited
        (scratch / "ready").mkdir()
        run_case(target, random.Random(0), scratch / "ready", START)
    loaded = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = loaded + (options.memory << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(READY, flush=True)
    end = time.monotonic() + options.turn
    try:
        while time.monotonic() < end:
            folder = scratch / str(number)
            folder.mkdir()
            try:
                done = run_case(target, source_of(options.seed, target, number), folder, options.limit)
                word, text = (ACCEPTED if done else REFUSED), ""
            except KeyboardInterrupt:
                return
            except BaseException as error:  # every other error is what is looked for
                word, text = FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:300]
                keep(options, target, number, folder, traceback.format_exc())
            shutil.rmtree(folder, ignore_errors=True)
            print(number, word, text, flush=True)
            number += 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def keep(options: argparse.Namespace, target: str, number: int, files: Path | None, text: str) -> None:
    """Keep the files of a case that failed, with the error and the command that repeats it."""
    folder = options.keep / f"{target}-{options.seed}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    if files is not None:
        shutil.copytree(files, folder, symlinks=True)
    folder.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/fuzz.py --only {target} --seed {options.seed} --case {number}"
    (folder / "error.txt").write_text(f"{command}\n\n{text}", encoding="utf-8", errors="backslashreplace")


class Fuzzing:
    """The counts of all targets, and the processes that work on them in turn."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.targets = options, chosen(options.only)
        self.counts = {target: Counter[str]() for target in self.targets}
        self.next = dict.fromkeys(self.targets, 0)
        self.failures: list[dict[str, object]] = []
        self.slowest: dict[str, float] = dict.fromkeys(self.targets, 0.0)
        self.start = 0.0
        "seconds until the last process was ready"
        self.patience = float(START)
        "seconds to wait for the next line of a process"
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> int:
        """Let the targets take turns until the time is over; return the exit code."""
        total = 60 * self.options.minutes
        print(f"seed {self.options.seed}, {len(self.targets)} targets, {self.options.minutes:g} minutes")
        try:
            while self.seconds < total:
                for k, target in enumerate(self.targets):
                    if (left := total - self.seconds) > 0:
                        # All get a turn, however little time there is.
                        share = left / (len(self.targets) - k) - self.start
                        self.turn(target, min(self.options.turn, max(1, share)))
        except KeyboardInterrupt:
            print()
        self.report()
        return 1 if self.failures else 0

    def turn(self, target: str, seconds: float) -> None:
        """Run one process for a target; one that hangs or crashes is a failure of its case."""
        command = [sys.executable, str(Path(__file__).resolve()), "--work", target, "--seed", str(self.options.seed)]
        command += ["--first", str(self.next[target]), "--turn", str(seconds), "--limit", str(self.options.limit)]
        command += ["--memory", str(self.options.memory), "--keep", str(self.options.keep)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        try:
            reason = self.follow(target, process)
            errors = process.communicate(timeout=GRACE)[1].decode(errors="replace")
            if reason or process.returncode:
                self.fail(
                    target, self.next[target], reason or f"the process ended with {process.returncode}: {errors[-200:]}"
                )
                keep(self.options, target, self.next[target], None, f"{reason}\n{errors}")
                self.next[target] += 1
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def follow(self, target: str, process: subprocess.Popen[bytes]) -> str:
        """Count what a process prints; return why it had to be killed, or nothing."""
        self.patience, last = float(START), time.monotonic()
        for line in lines(process, lambda: self.patience):
            number, word, *text = f"{line} ".split(" ", 2) if line != READY else ("", READY)
            if word == READY:
                self.start = time.monotonic() - last
            else:
                self.slowest[target] = max(self.slowest[target], time.monotonic() - last)
                self.next[target] = int(number) + 1
                self.counts[target][word] += 1
                if word == FAILED:
                    self.counts[target][FAILED] -= 1
                    self.fail(target, int(number), " ".join(text).strip())
            self.patience, last = self.options.limit + GRACE, time.monotonic()
            self.show(target)
        if process.poll() is None and time.monotonic() - last > self.patience:
            process.kill()
            return f"it did not answer for {self.patience:g} s"
        return ""

    def fail(self, target: str, number: int, text: str) -> None:
        self.counts[target][FAILED] += 1
        self.failures.append({"target": target, "case": number, "error": text})
        print(f"\r\033[K{target} {number}: {text}")

    def show(self, target: str) -> None:
        """Print the live line."""
        cases = sum(sum(count.values()) for count in self.counts.values())
        if sys.stdout.isatty():
            text = f"{self.seconds / 60:.1f} min, {cases:,} cases, {len(self.failures)} failed; {target}"
            print(f"\r\033[K{text}", end="", flush=True)

    def report(self) -> None:
        """Print the table of counts, and write it to a file."""
        print(f"\r{'target':<28}{'cases':>9}{'accepted':>10}{'refused':>9}{'failed':>8}{'slowest':>9}")
        rows = {}
        for target, count in self.counts.items():
            cases = sum(count.values())
            rows[target] = {"cases": cases, **{word: count[word] for word in (ACCEPTED, REFUSED, FAILED)}}
            rows[target]["slowest_seconds"] = round(self.slowest[target], 2)
            words = f"{count[ACCEPTED]:>10,}{count[REFUSED]:>9,}{count[FAILED]:>8,}{self.slowest[target]:>8.1f}s"
            print(f"{target:<28}{cases:>9,}{words}")
        total = sum((count for count in self.counts.values()), Counter[str]())
        words = f"{total[ACCEPTED]:>10,}{total[REFUSED]:>9,}{total[FAILED]:>8,}"
        print(f"{'all':<28}{sum(total.values()):>9,}{words}")
        facts = {
            "command": "python benchmarks/fuzz.py",
            "date": datetime.now(UTC).date().isoformat(),
            "version": version("equipoise"),
            "python": platform.python_version(),
            "seed": self.options.seed,
            "minutes": round(self.seconds / 60, 1),
            "memory_mb": self.options.memory,
            "limit_seconds": self.options.limit,
            "targets": rows,
            "failures": self.failures,
        }
        self.options.out.write_text(json.dumps(facts, indent=2) + "\n")
        print(f"counts: {self.options.out}" + (f"; failures: {self.options.keep}" if self.failures else ""))


def lines(process: subprocess.Popen[bytes], patience: Callable[[], float]) -> Iterator[str]:
    """Yield the lines of a process; stop at its end, or when there is none for as long as patience lasts."""
    assert process.stdout is not None
    rest = b""
    while select.select([process.stdout], [], [], patience())[0]:
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)


if __name__ == "__main__":
    main()
