"""Disturb runs at random and compare what they come to with undisturbed runs, byte for byte.

    python benchmarks/chaos.py --minutes 60 [--seed 0] [--out FILE.json] [--kind simulations] [--keep DIR]
    python benchmarks/chaos.py --seed 0 --trial 17

A trial is a small experiment, simulated (`equipoise run`, in one or two processes) or deployed (`equipoise deploy
local`). Its processes are killed, interrupted, stopped for a while; between two attempts a file of its checkpoint or
its logs may be damaged; then it is resumed, until it has finished. Its metrics, scores of clients, summary (without
clocks and memory), and the models in its last checkpoint must be those of a run that nobody disturbed. Damage that
cannot be repaired must be refused in a sentence. No process may outlive an attempt.

What a trial does follows from the seed and its number, so that `--trial N` repeats it, as far as the machine's timing
allows; `--first N` continues a series. The folders of trials that failed are kept.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import tomli_w
from safetensors.torch import load_file

LIMIT = 600.0  # seconds after which an attempt counts as hanging
GRACE = 20.0  # seconds in which everything must be gone after an attempt
PATIENCE = 10.0  # seconds to wait for a process that is only there at times
MARK = "EQUIPOISE_CHAOS"
RESIDENT = "equipoise.flower.warm.resident"
PARTS = ("serverapp", "supernode", "clientapp", "superlink", "resident", "warm child")
CLOCKS = {"seconds", "samples_per_second", "peak_memory_mb", "step_memory_mb", "mode"}
REPEATED = {
    "message_bytes_up",
    "message_bytes_down",
    "bytes_up",
    "bytes_down",
    "bytes_a_round",
    "gradient_samples",
    "refused",
    "parameters_sent",
    "left_out",
}
# Of a deployment, whose exchanges may have been repeated.
DIGITS = {"name": "digits-by-writer", "clients": 6}
LINEAR = {"name": "softmax"}
SIMULATIONS = {
    "ditto": {"algorithm": {"name": "ditto", "lr": 0.1}},
    "ditto threads": {"algorithm": {"name": "ditto", "lr": 0.1}, "engine": {"mode": "threads"}},
    "flame": {"algorithm": {"name": "flame"}},
    "fedrep": {"algorithm": {"name": "fedrep"}, "model": {"name": "mlp", "hidden": [16]}},
    "fedrep threads": {
        "algorithm": {"name": "fedrep"},
        "model": {"name": "mlp", "hidden": [16]},
        "engine": {"mode": "threads"},
    },
    "fedavg attacked": {
        "algorithm": {"name": "fedavg", "lr": 0.1},
        "attack": {"name": "sign-flip", "fraction": 0.34},
        "reducer": {"name": "median"},
    },
    "fedavg private": {"algorithm": {"name": "fedavg", "lr": 0.1}, "privacy": {"clip": 1.0, "sigma": 0.5}},
    "ditto private": {
        "algorithm": {"name": "ditto", "lr": 0.1},
        "privacy": {"clip": 1.0, "sigma": 0.5},
        "engine": {"mode": "threads"},
    },
    "pfedme": {"algorithm": {"name": "pfedme"}},
    "fedadmm": {"algorithm": {"name": "fedadmm"}, "engine": {"mode": "stacked"}},
    "cfl": {"algorithm": {"name": "cfl"}},
}
DEPLOYMENTS = {
    "ditto": {"algorithm": {"name": "ditto", "lr": 0.1}},
    "fedrep": {"algorithm": {"name": "fedrep"}, "model": {"name": "mlp", "hidden": [16]}},
    "flame": {"algorithm": {"name": "flame"}},
}
DAMAGE = ("manifest", "server", "segment", "metrics", "timings", "no timings", "part")


def lives(folder):
    """Tell whether a process, given as its folder in /proc, is there and has not ended."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def marked(mark):
    """Return the numbers and commands of all processes that were started with this mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes() and lives(folder):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
    return found


def chosen(target, found):
    """Return the processes of a deployment at which a disturbance is aimed.

    Args:
        target: a part of a command; or "resident", the process that runs warm clients; or "warm child", one at work.
        found: numbers and commands of all processes.
    """
    if target not in ("resident", "warm child"):
        return [pid for pid, command in found.items() if target in command.split(" --")[0]]
    warm = {pid for pid, command in found.items() if RESIDENT in command and "keeper.py" not in command}
    below = [pid for pid in warm if parent(pid) in warm]
    return below if target == "warm child" else [pid for pid in warm if pid not in below]


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def send(pid, number):
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Failed(Exception):
    """Something that must not happen."""


class Trial:
    """One experiment that is disturbed until it has finished."""

    def __init__(self, number, seed, kind, folder, references, counts, without):
        self.rng = random.Random(f"{seed}/{number}")
        self.kind = kind or ("deployments" if self.rng.random() < 0.15 else "simulations")
        self.deployed = self.kind == "deployments"
        self.name = self.rng.choice(list(DEPLOYMENTS if self.deployed else SIMULATIONS))
        self.number, self.folder, self.references, self.counts = number, folder, references, counts
        self.processes = 1 if self.deployed or self.rng.random() < 0.75 else 2
        self.every = self.rng.choice([1, 2, 3]) if not self.deployed else 1
        self.damages = [kind for kind in DAMAGE if kind not in without]
        self.damaged = []
        self.mark = str(folder)
        self.out = folder / "run"
        self.history = []

    def write(self, path):
        """Write the experiment, and return its number of rounds."""
        rounds = 4 if self.deployed else 200  # enough that a signal comes in the middle
        tables = {"rounds": rounds, "participation": 1.0 if self.deployed else 3, "checkpoint_every": self.every}
        tables["evaluate_every"] = 1 if self.deployed else 5
        tables |= {"data": {**DIGITS, "clients": 2 if self.deployed else 6}, "model": LINEAR}
        tables |= (DEPLOYMENTS if self.deployed else SIMULATIONS)[self.name]
        tables["engine"] = {**tables.get("engine", {}), "workers": 1}
        if self.deployed:  # nobody may be left out, or the numbers would rightly be others
            tables["deploy"] = {"minimum": 2, "attempts": 10}
        path.write_text(tomli_w.dumps(tables))
        return rounds

    def command(self, out, resume):
        command = [sys.executable, "-m", "equipoise", *(["deploy", "local"] if self.deployed else ["run"])]
        command += [str(self.folder / "chaos.toml"), "--out", str(out), "--quiet"]
        command += ["--processes", "2"] if self.processes > 1 else []
        return command + (["--resume"] if resume else [])

    def start(self, out, resume):
        log = (self.folder / "log").open("ab")
        environment = {**os.environ, MARK: self.mark}
        with log:
            return subprocess.Popen(
                self.command(out, resume), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def reference(self):
        """Return the results of the same experiment without any disturbance."""
        key = (self.kind, self.name, self.every)
        if key not in self.references:
            out = self.folder / "reference"
            process = self.start(out, resume=False)
            if process.wait(LIMIT):
                raise Failed(f"the undisturbed run failed: {self.log()[-1:]}")
            self.references[key] = self.results(out)
        return self.references[key]

    def run(self):
        """Disturb the experiment until it has finished; return what it came to."""
        rounds = self.write(self.folder / "chaos.toml")
        expected = self.reference()
        disturbances = self.rng.randint(1, 2 if self.deployed else 4)
        while True:
            resume = (self.out / "run.toml").exists()
            length = (self.folder / "log").stat().st_size if (self.folder / "log").exists() else 0
            process = self.start(self.out, resume)
            disturbed = None
            if disturbances > 0:
                disturbances -= 1
                disturbed = self.disturb(process, rounds)
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                raise Failed(f"it hangs after {disturbed}") from None
            self.nothing_left()
            said = (self.folder / "log").read_bytes()[length:].decode(errors="replace")
            if disturbed is None or "kill" not in disturbed:
                over = disturbed is not None and (self.out / "summary.json").exists()  # Python itself was ending
                if "Traceback" in said and not over:
                    raise Failed(f"a traceback after {disturbed} and {self.damaged}")
            if code == 0:
                break
            if disturbed is None:
                if self.damaged and any(line.startswith("equipoise: ") for line in said.splitlines()):
                    self.counts["refused with a sentence"] += 1
                    return "refused"
                raise Failed(f"exit code {code} after {self.damaged}")
            if not self.deployed and self.rng.random() < 0.5:
                self.damage()
        found = self.results(self.out)
        different = [name for name in expected if found.get(name) != expected[name]]
        if different or found.keys() != expected.keys():
            raise Failed(f"{', '.join(different) or 'the files'} differ after {self.damaged or 'no damage'}")
        self.counts["equal"] += 1
        return "equal"

    def disturb(self, process, rounds):
        """Wait for a random moment and do something to a random process; return what was done."""
        wanted = self.rng.randint(0, rounds)
        pause = self.rng.uniform(0.0, 4.0 if self.deployed else 0.1)
        blind = self.rng.random() < 0.2
        action = self.rng.choice(["kill", "kill", "terminate", "interrupt", "stop"])
        target = self.rng.choice(["itself", "itself", *PARTS])
        until = time.monotonic() + (self.rng.uniform(0.0, 60.0 if self.deployed else 6.0) if blind else LIMIT)
        while process.poll() is None and time.monotonic() < until and self.rounds() < wanted:
            time.sleep(0.02)
        time.sleep(pause)
        if process.poll() is not None:
            return None
        victim = process.pid
        if self.deployed and target != "itself":
            until = time.monotonic() + PATIENCE
            while not (found := chosen(target, marked(self.mark))):
                if process.poll() is not None or time.monotonic() > until:
                    return None
                time.sleep(0.01)
            victim = self.rng.choice(sorted(found))
        elif self.processes > 1 and self.rng.random() < 0.3:
            victim, target = self.rng.choice(list(marked(self.mark)) or [victim]), "one of them"
        else:
            target = "itself"
        done = f"{action} {target} in round {self.rounds()}"
        self.history.append(done)
        if action == "stop":
            send(victim, signal.SIGSTOP)
            time.sleep(self.rng.uniform(0.1, 8.0 if self.deployed else 2.0))
            send(victim, signal.SIGCONT)
            self.counts["stops"] += 1
            return None if target == "itself" else done  # a process that stood still may have been given up by others
        if target != "itself" and action == "interrupt":
            action = "kill"  # nobody presses Ctrl-C for a part of a deployment
        numbers = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
        send(victim, numbers[action])
        self.counts["kills" if action == "kill" else "signals"] += 1
        return done if target == "itself" else f"kill {done}"

    def rounds(self):
        try:
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def damage(self):
        """Damage a file of the run at random."""
        kind = self.rng.choice(self.damages)
        checkpoint = self.out / "checkpoint"
        files = {
            "manifest": sorted(checkpoint.glob("round-*.json"))[-1:],
            "server": sorted(checkpoint.glob("server-*.safetensors"))[-1:],
            "segment": sorted(checkpoint.glob("clients-*.safetensors")),
            "metrics": [self.out / "metrics.jsonl"],
            "timings": [self.out / "timings.jsonl"],
            "no timings": [self.out / "timings.jsonl"],
            "part": sorted(checkpoint.glob("*.safetensors")),
        }
        found = [path for path in files[kind] if path.exists() and path.stat().st_size]
        if not found:
            return
        path = self.rng.choice(found)
        content = bytearray(path.read_bytes())
        how = self.rng.choice(["cut", "flip", "tail"])
        if kind == "no timings":
            path.unlink()
            how = "removed"
        elif kind == "part":
            path.with_name(path.name + ".part").write_bytes(content[: len(content) // 2])
            how = "left"
        elif how == "cut":
            path.write_bytes(content[: self.rng.randrange(len(content))])
        elif how == "flip":
            place = self.rng.randrange(len(content))
            content[place] ^= 1 << self.rng.randrange(8)
            path.write_bytes(content)
        else:
            path.write_bytes(content + self.rng.randbytes(self.rng.randint(1, 100)))
        self.damaged.append(f"{kind} {how}")
        self.history.append(f"damage {kind} {how} ({path.name})")
        self.counts["damaged files"] += 1

    def nothing_left(self):
        """Check that no process has outlived the attempt."""
        until = time.monotonic() + GRACE
        while left := marked(self.mark):
            if time.monotonic() > until:
                for pid in left:
                    send(pid, signal.SIGKILL)
                raise Failed(f"{len(left)} processes outlived it, such as: {next(iter(left.values()))[:200]}")
            time.sleep(0.05)

    def results(self, out):
        """Return everything that must be the same, by name."""
        summary = json.loads((out / "summary.json").read_text())
        dropped = CLOCKS | REPEATED if self.deployed else CLOCKS
        found = {"summary.json": {key: value for key, value in summary.items() if key not in dropped}}
        for name in ("metrics.jsonl", "clients.csv"):
            found[name] = (out / name).read_bytes()
        manifest = json.loads(sorted((out / "checkpoint").glob("round-*.json"))[-1].read_text())
        tensors = load_file(out / "checkpoint" / manifest["server"])
        found["server"] = {
            name: tensor.numpy().tobytes() for name, tensor in tensors.items() if name.startswith("server.")
        }
        if "store.who" in tensors and not self.deployed:
            segments = {}
            columns = (tensors[f"store.{name}"].tolist() for name in ("who", "segment", "row"))
            for client, number, row in zip(*columns, strict=True):
                if number not in segments:
                    segments[number] = load_file(out / "checkpoint" / f"clients-{number:06d}.safetensors")
                state = {name: tensor[row].numpy().tobytes() for name, tensor in segments[number].items()}
                found[f"state of client {client}"] = state
        for path in sorted((out / "deployment" / "clients").glob("*/state/*/personal.safetensors")):
            found[f"model of {path.parents[2].name}"] = path.read_bytes()
        return found

    def log(self):
        return (self.folder / "log").read_text(errors="replace").splitlines()

    def end(self):
        """End everything that this trial has started."""
        for pid in marked(self.mark):
            send(pid, signal.SIGKILL)


def table(counts, failures):
    lines = [f"{name:<26}{counts[name]:>7,}" for name in ORDER]
    return "\n".join([*lines, f"{'failures':<26}{len(failures):>7,}"])


ORDER = ("simulations", "deployments", "kills", "signals", "stops", "damaged files", "equal", "refused with a sentence")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes after which no further trial is started")
    parser.add_argument("--seed", type=int, default=0, help="what the trials follow from")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--trial", type=int, help="only this trial")
    parser.add_argument("--kind", choices=["simulations", "deployments"], help="only trials of this kind")
    parser.add_argument("--without", action="append", default=[], choices=DAMAGE, help="a damage to leave out")
    parser.add_argument("--keep", type=Path, default=Path("chaos"), help="folder for the trials that failed")
    parser.add_argument("--out", type=Path, help="file for the counts, as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    counts, references, failures = Counter(), {}, []
    began, number = time.monotonic(), options.first if options.trial is None else options.trial

    def report():
        facts = {"seed": options.seed, "minutes": round((time.monotonic() - began) / 60, 1), "trials": number}
        facts |= {name: counts[name] for name in ORDER} | {"failures": failures}
        if options.out:
            options.out.write_text(json.dumps(facts, indent=2) + "\n")

    work = Path(tempfile.mkdtemp(prefix="chaos-"))
    trial = None
    try:
        while time.monotonic() - began < 60 * options.minutes:
            folder = work / f"trial-{number:05d}"
            folder.mkdir()
            trial = Trial(number, options.seed, options.kind, folder, references, counts, options.without)
            counts[trial.kind] += 1
            try:
                outcome = trial.run()
                shutil.rmtree(folder)
            except Exception as error:
                trial.end()
                options.keep.mkdir(parents=True, exist_ok=True)
                kept = options.keep / f"seed-{options.seed}-trial-{number}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.move(folder, kept)
                outcome = f"FAILED: {type(error).__name__}: {error}"
                again = f"python benchmarks/chaos.py --seed {options.seed} --trial {number}"
                again += f" --kind {options.kind}" if options.kind else ""
                facts = {"trial": number, "kind": trial.kind, "experiment": trial.name, "why": outcome}
                failures.append(facts | {"history": trial.history, "folder": str(kept), "again": again})
            minutes = (time.monotonic() - began) / 60
            steps = "; ".join(trial.history) or "nothing"
            print(
                f"{minutes:6.1f} min  {number:5d}  {trial.kind[:-1]:<10}  {trial.name:<16} {outcome}: {steps}",
                flush=True,
            )
            number += 1
            report()
            if options.trial is not None:
                break
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        if trial is not None:
            trial.end()
        shutil.rmtree(work, ignore_errors=True)
        report()
    print(table(counts, failures))
    for failure in failures:
        print(f"{failure['why']}\n  {failure['folder']}\n  {failure['again']}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
