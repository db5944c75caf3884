"""Record what the program does, and compare two recordings: a refactoring must not change any number.

    python scripts/behaviour.py record DIR       all algorithms in both modes, a resumed run, a deployment
    python scripts/behaviour.py resume OLD DIR   finish with this version a run that the version of OLD started
    python scripts/behaviour.py compare OLD NEW  list every difference; exit code 1 if there is one

Only the command line and the files of run folders are used, so that two versions with entirely different modules can be
compared. Times, memory and the wording of `--help` are ignored; the names of options are compared.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMMANDS = (
    "",
    "run",
    "demo",
    "compare",
    "plot",
    "list",
    "export",
    "show",
    "sweep",
    "cka",
    "audit",
    "reproduce",
    "report",
    "watch",
    "data",
    "data list",
    "data get",
    "deploy",
    "deploy local",
    "deploy init",
)
KINDS = ("algorithms", "models", "data", "partitions", "attacks", "reducers")
SPECIAL: dict[str, list[str]] = {
    "fedcr": ["model.name=gaussian-mlp"],
    "fedeq": ["model.name=deq-mlp", "model.hidden=16", "model.width=24"],
    "fl-deq": ["model.name=deq-mlp", "model.hidden=16", "model.width=24"],
    "pfedme": ["algorithm.local_rounds=2", "algorithm.inner_steps=2"],
    "learn2pfed": ["algorithm.cells=2"],
    "cfl": ["algorithm.quiet=0", "algorithm.eps1=100", "algorithm.eps2=0.0001"],
}
EXTRAS: dict[str, list[str]] = {
    "attack-krum": [
        "algorithm.name=ditto",
        "participation=9",
        "attack.name=sign-flip",
        "attack.fraction=0.2",
        "reducer.name=krum",
    ],
    "median": ["algorithm.name=fedavg", "reducer.name=median"],
    "private-local": ["algorithm.name=fedavg", "privacy.clip=1.0", "privacy.sigma=0.1"],
    "private-central": ["algorithm.name=flame", "privacy.clip=1.0", "privacy.sigma=0.1", "privacy.where=central"],
    "momentum": ["algorithm.name=fedrep", "algorithm.momentum=0.5", "algorithm.clip=0.5"],
    "adam": ["algorithm.name=flame", "algorithm.optimizer=adam"],
    "unseen": ["algorithm.name=ditto", "data.unseen=0.2"],
    "inexact": ["algorithm.name=flame", "algorithm.epsilon=0.01"],
}
TOML = """
seed = 3
rounds = 3
participation = 6
evaluate_every = 1
checkpoint_every = 2
[data]
name = "digits-by-writer"
clients = 12
partition = {kind = "natural"}
split = [0.6, 0.15, 0.25]
[model]
name = "mlp"
hidden = [16]
[algorithm]
name = "fedavg"
lr = 0.1
epochs = 2
batch = 10
[engine]
workers = 2
"""
CLOCKS = {"seconds", "samples_per_second", "peak_memory_mb", "started", "finished", "when"}


def program(*words: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).parent / "equipoise"), *words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if check and done.returncode:
        print(f"{' '.join(words)}: {done.stderr.strip()[-500:]}", file=sys.stderr)
    return done


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if k not in CLOCKS}
    return [without_clocks(v) for v in value] if isinstance(value, list) else value


def digest(path: Path) -> str:
    """Return a digest of a file; in safetensors files the order of the header's keys is random and does not count."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        size = int.from_bytes(data[:8], "little")
        data = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True).encode() + data[8 + size :]
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def contents(folder: Path) -> dict[str, Any]:
    """Return the contents of a run folder: numbers as they are, tensors and texts as digests."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.name in ("timings.jsonl", "lock", ".lock") or path.suffix in (".log", ".png"):
            found[name] = "present"
        elif path.suffix == ".jsonl":
            found[name] = [without_clocks(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name == "summary.json":
            found[name] = without_clocks(json.loads(path.read_text()))
        elif path.suffix == ".json":  # a checkpoint's manifest
            found[name] = sorted(json.loads(path.read_text()))
        elif path.suffix == ".toml":
            found[name] = path.read_text().replace(str(folder.parent), "")
        else:
            found[name] = digest(path)
    return found


def record(out: Path) -> None:
    """Record all algorithms in both modes, a resumed run, a deployment, listings and helps."""
    out = out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "base.toml").write_text(TOML)
    listings = {kind: program("list", kind, "--json", cwd=out).stdout for kind in KINDS}
    names = [entry["name"] for entry in json.loads(listings["algorithms"])]
    jobs: dict[str, list[str]] = {}
    for name in names:
        for mode in ("threads", "stacked"):
            sets = [f"algorithm.name={name}", f"engine.mode={mode}", "engine.precision=float64", *SPECIAL.get(name, [])]
            jobs[f"{name}-{mode}"] = sets
    jobs.update(EXTRAS)

    def one(item: tuple[str, list[str]]) -> tuple[str, Any]:
        name, sets = item
        words = ["run", "base.toml", "--out", f"runs/{name}", "--quiet"]
        done = program(*words, *(x for s in sets for x in ("--set", s)), cwd=out, check=False)
        if done.returncode:
            return name, {"exit": done.returncode, "stderr": done.stderr.strip()[-300:]}
        return name, contents(out / "runs" / name)

    found: dict[str, Any] = {}
    with ThreadPoolExecutor(2) as pool:
        for name, value in pool.map(one, jobs.items()):
            found[name] = value
            print(name, value.get("stderr", "") if "exit" in value else "", file=sys.stderr, flush=True)
    helps = {c: program(*c.split(), "--help", cwd=out).stdout for c in COMMANDS}
    begun = ["run", "base.toml", "--set", "algorithm.name=flame", "--out", "begun", "--quiet"]
    program(*begun, "--set", "rounds=4", cwd=out)
    shutil.copytree(out / "begun", out / "half")  # as if it had been killed in the third round
    (out / "half" / "summary.json").unlink()
    for later in (out / "half" / "checkpoint").glob("*-000004.*"):
        later.unlink()
    deployed = program("deploy", "local", "base.toml", "--clients", "3", "--set", "data.clients=3", "--set",
                       "participation=1.0", "--set", "algorithm.name=ditto", "--out", "deployed", cwd=out)  # fmt: skip
    print(deployed.stdout[-300:], deployed.stderr[-500:], file=sys.stderr)
    wanted = r"metrics.jsonl|summary.json|clients.csv|[a-z.]*safetensors"
    files = {k: v for k, v in contents(out / "deployed").items() if re.fullmatch(wanted, k)}
    result = {
        "runs": found,
        "whole": contents(out / "begun"),
        "deployment": files,
        "list": {k: json.loads(v) for k, v in listings.items()},
        "help": {c: sorted(set(re.findall(r"--[a-z][a-z-]*", text))) for c, text in helps.items()},
        "help_text": helps,
    }
    (out / "recorded.json").write_text(json.dumps(result, indent=1))


def resume(old: Path, out: Path) -> None:
    """Check that this version finishes a run of another version with the same bytes."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(old / "base.toml", out)
    shutil.copytree(old / "half", out / "begun")
    words = ["run", "base.toml", "--set", "algorithm.name=flame", "--set", "rounds=4", "--out", "begun", "--resume"]
    done = program(*words, "--quiet", cwd=out)
    before = json.loads((old / "recorded.json").read_text())["whole"]
    after = contents(out / "begun")
    differences = [*differ(before, after, "resumed")]
    print(done.stderr, *differences or ["resumed: the same"], sep="\n")
    sys.exit(bool(differences))


def differ(a: Any, b: Any, where: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted(a.keys() | b.keys()) for d in differ(a.get(k), b.get(k), f"{where}/{k}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for k, (x, y) in enumerate(zip(a, b, strict=True)) for d in differ(x, y, f"{where}/{k}")]
    if where.endswith("run.toml") and isinstance(a, str) and isinstance(b, str):  # where the data were is no behaviour
        a, b = (re.sub(r'^data = ".*"$', "", text, flags=re.MULTILINE) for text in (a, b))
    return [] if a == b else [f"{where}: {str(a)[:100]!r} -> {str(b)[:100]!r}"]


def compare(old: Path, new: Path) -> None:
    """Print every difference between two recordings."""
    a, b = (json.loads((folder / "recorded.json").read_text()) for folder in (old, new))
    wording = [d for part in ("help_text",) for d in differ(a.pop(part), b.pop(part), part)]
    for part in (a, b):
        for entries in part["list"].values():
            for entry in entries:
                entry.pop("summary", None)
                for row in entry.get("parameters", []):
                    row.pop("meaning", None)
    differences = differ(a, b, "")
    print(*differences, sep="\n")
    same = sum(len(v) if isinstance(v, dict) else 1 for v in a["runs"].values())
    print(f"{len(a['runs'])} runs, {same} files, {len(differences)} differences; {len(wording)} help texts differ")
    sys.exit(bool(differences))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "resume", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    arguments = parser.parse_args()
    {"record": record, "resume": resume, "compare": compare}[arguments.what](*arguments.folders)
