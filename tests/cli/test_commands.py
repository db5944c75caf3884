"""The command line, used as a person would."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise.data.federation import Federation
from equipoise.runs.launch import reopen
from tests.support.commands import SMALL, equipoise_command, one_sentence
from tests.support.forked_commands import ForkedCommand
from tests.support.waiting import FOREVER, until


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(rounds=3, name="ditto"))
    return path


@pytest.mark.slow
def test_run_compare_and_export(file: Path, tmp_path: Path) -> None:
    for seed, real in ((0, True), (1, False)):
        done = equipoise_command("run", file, "--set", f"seed={seed}", cwd=tmp_path, real=real)
        assert done.returncode == 0, done.stderr
        assert f"runs/small-ditto-seed{seed}" in done.stdout
        assert "ditto" in done.stdout
        assert "3/3" in done.stderr
    folder = tmp_path / "runs" / "small-ditto-seed0"
    assert {p.name for p in folder.iterdir()} >= {
        *("run.toml", "metrics.jsonl", "timings.jsonl", "clients.csv", "summary.json", "checkpoint"),
    }
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("algorithm", "dataset", "rounds", "bytes_up", "bytes_down", "parameters_shared", "parameters_personal"):
        assert key in summary
    for key in ("gradient_samples", "seconds", "samples_per_second", "peak_memory_mb"):
        assert summary[key] > 0
    for kind in ("personal", "global", "hybrid"):
        assert {"accuracy", "accuracy_std", "loss_variance", "worst_decile"} <= set(summary[kind])
    assert len((folder / "clients.csv").read_text().splitlines()) == 7

    rows = json.loads(equipoise_command("compare", "runs", "--format", "json", cwd=tmp_path).stdout)
    [row] = rows  # two seeds are one row
    accuracies = [
        json.loads((tmp_path / "runs" / f"small-ditto-seed{s}" / "summary.json").read_text())["personal"]["accuracy"]
        for s in (0, 1)
    ]
    assert row["seeds"] == 2
    assert row["personal"] == pytest.approx(sum(accuracies) / 2)
    assert row["personal_std"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)
    shown = equipoise_command("compare", "runs", "--format", "md", cwd=tmp_path).stdout
    assert f"{100 * row['personal']:.2f} ± {100 * row['personal_std']:.2f}" in shown
    assert equipoise_command("compare", "runs", "--format", "csv", cwd=tmp_path).stdout.startswith("algorithm,data,")
    assert "±" in equipoise_command("compare", "runs", cwd=tmp_path).stdout

    result, _ = reopen(folder)
    federation: Federation = result.federation
    for option, module in (
        (("--client", "2"), result.personal(2)),
        (("--client", federation.names[2]), result.personal(2)),
        (("--global",), result.global_model()),
    ):
        done = equipoise_command("export", folder, *option, "--out", "model.safetensors", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        loaded = equipoise.load_model(tmp_path / "model.safetensors")
        x = federation.x[:5]
        assert torch.equal(loaded(x), module(x))


@pytest.mark.slow
def test_resume_goes_on_and_may_go_further(file: Path, tmp_path: Path) -> None:
    whole = equipoise_command("run", file, "--set", "rounds=5", "--out", "whole", "--quiet", cwd=tmp_path)
    assert (whole.returncode, whole.stdout, whole.stderr) == (0, "", "")
    assert equipoise_command("run", file, "--out", "half", "--quiet", cwd=tmp_path).returncode == 0
    more = equipoise_command("run", file, "--set", "rounds=5", "--out", "half", "--resume", "--quiet", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert (tmp_path / "half" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    again = equipoise_command("run", file, "--set", "rounds=5", "--out", "half", "--resume", cwd=tmp_path)
    assert again.returncode == 0
    other = equipoise_command("run", file, "--set", "algorithm.lr=0.2", "--out", "half", "--resume", cwd=tmp_path)
    assert other.returncode == 2
    assert "had algorithm.lr = 0.1, not 0.2" in other.stderr


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    file.write_text(SMALL.format(rounds=FOREVER, name="fedrep"))
    log = tmp_path / "long" / "metrics.jsonl"
    with ForkedCommand("run", file, "--out", "long", "--quiet", cwd=tmp_path) as child:
        until(lambda: (log.exists() and log.read_text().count("\n") > 4) or not child.process.is_alive())
        child.interrupt()
        assert child.wait() == 130, child.said()
    said = child.said()
    assert "Traceback" not in said
    assert "--resume" in said
    rounds = len(log.read_text().splitlines())
    assert f"stopped after round {rounds}" in said
    resume = ["run", file, "--set", f"rounds={rounds + 2}", "--out", "long", "--resume", "--quiet"]
    done = equipoise_command(*resume, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(log.read_text().splitlines()) == rounds + 2


@pytest.mark.slow
def test_bad_input_gets_one_sentence(file: Path, tmp_path: Path) -> None:
    run = lambda *a: equipoise_command("run", *a, cwd=tmp_path)  # noqa: E731
    one_sentence(run("nothing.toml"), 2, "there is no file nothing.toml")
    one_sentence(run(file, "--set", "algorithm.lrr=1"), 2, "algorithm.lrr", "did you mean 'lr'")
    missing = run(file, "--set", "data.name=fashion-mnist", "--set", "data.partition={kind='iid'}")
    one_sentence(missing, 2, "train-images-idx3-ubyte", str(tmp_path / "data"), "equipoise data get fashion-mnist")
    one_sentence(run(file, "--set", "participation=60"), 2, "participation = 60", "6 clients")
    one_sentence(run(file, "--set", "data.clients=90"), 2, "data.clients = 90", "80 owners")
    (tmp_path / "taken").write_text("")
    one_sentence(run(file, "--out", "taken"), 2, "cannot create the folder taken")
    one_sentence(run(file, "--out", "taken/below"), 2, "cannot create the folder taken/below")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    one_sentence(run(file, "--out", "full"), 2, "full is not empty and not a run")
    assert run(file, "--out", "done", "--quiet").returncode == 0
    one_sentence(run(file, "--out", "done"), 2, "already holds a run", "--resume")
    compare = equipoise_command("compare", "full", cwd=tmp_path)
    one_sentence(compare, 2, "full holds no run")
    one_sentence(equipoise_command("compare", "nowhere", cwd=tmp_path), 2, "there is no folder nowhere")
    export = lambda *a: equipoise_command("export", *a, "--out", "m.safetensors", cwd=tmp_path)  # noqa: E731
    one_sentence(export("done"), 2, "either --client K or --global")
    one_sentence(export("done", "--client", "77"), 2, "there is no client 77", "0 to 5")
    one_sentence(export("full", "--global"), 2, "full is not the folder of a run")
    assert not (tmp_path / "m.safetensors").exists()


def test_a_run_that_diverges_stops_with_a_sentence_and_its_checkpoint(file: Path, tmp_path: Path) -> None:
    arguments = ("--set", "algorithm.lr=1e30", "--set", "model.name=mlp", "--set", "algorithm.epochs=5", "--out", "bad")
    done = equipoise_command("run", file, *arguments, "--quiet", cwd=tmp_path)
    one_sentence(done, 1, "every client's update has NaN or infinite numbers", "algorithm.lr")
    assert (tmp_path / "bad" / "checkpoint").is_dir()


@pytest.mark.slow
def test_a_full_disk_brings_a_sentence_and_spoils_nothing(file: Path, tmp_path: Path) -> None:
    with ForkedCommand("run", file, "--out", "run", "--quiet", cwd=tmp_path, largest_file=60_000) as process:
        code = process.wait()
    done = subprocess.CompletedProcess([], code, "", process.said())
    one_sentence(done, 2, "cannot write", "run/checkpoint/clients-000000.safetensors")
    assert not list((tmp_path / "run").rglob("*.part"))
    assert equipoise_command("run", file, "--out", "run", "--resume", "--quiet", cwd=tmp_path).returncode == 0
    assert equipoise_command("run", file, "--out", "whole", "--quiet", cwd=tmp_path).returncode == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_two_processes_do_not_share_a_folder(file: Path, tmp_path: Path) -> None:
    import fcntl

    assert equipoise_command("run", file, "--out", "run", "--quiet", cwd=tmp_path).returncode == 0
    with (tmp_path / "run" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = equipoise_command("run", file, "--out", "run", "--resume", cwd=tmp_path)
    one_sentence(done, 2, "another process is using run")


@pytest.mark.parametrize("kind", ["algorithms", "models", "data", "partitions"])
def test_list_tells_everything(kind: str, tmp_path: Path) -> None:
    entries = json.loads(equipoise_command("list", kind, "--json", cwd=tmp_path).stdout)
    shown = equipoise_command("list", kind, cwd=tmp_path).stdout
    for entry in entries:
        assert entry["summary"]
        assert entry["name"] in shown
        if kind in ("models", "data", "algorithms") and entry["name"] not in (
            "local",
            "feature-decay",
            "folder",
            "loads",
        ):
            assert entry["paper"]
        for parameter in entry["parameters"]:
            assert parameter["meaning"], parameter
            assert parameter["allowed"]


def test_help_teaches(tmp_path: Path) -> None:
    shown = equipoise_command("--help", cwd=tmp_path).stdout
    for word in ("run", "compare", "demo", "list", "export"):
        assert word in shown
    assert "--resume" in equipoise_command("run", "--help", cwd=tmp_path).stdout
    wrong = equipoise_command("lst", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from equipoise.cli.demo import demo
    from equipoise.runs import demo as module

    monkeypatch.setattr(module, "ROUNDS", 2)
    demo(tmp_path / "demo")
    printed = capsys.readouterr().out
    for word in ("local", "fedavg-ft", "ditto", "fedrep", "personal", "sent MB", "accuracy.png", "Try next"):
        assert word in printed
    picture = (tmp_path / "demo" / "accuracy.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    demo(tmp_path / "demo")  # a second time shows what is there


@pytest.mark.parametrize("kind", ["algorithms", "models", "data", "partitions", "attacks", "reducers"])
def test_a_list_has_one_line_for_each_that_fits_the_terminal(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.commands.WIDTH", 80)
    entries = json.loads(equipoise_command("list", kind, "--json", cwd=tmp_path).stdout)
    lines = equipoise_command("list", kind, cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [entry["name"] for entry in entries]
    assert f"equipoise list {kind} NAME" in lines[-1]
    for line, entry in zip(lines, entries, strict=False):
        assert len(line) <= 80
        text = line.removeprefix(entry["name"]).strip()
        assert entry["summary"].startswith(text.removesuffix("…").strip())


def test_the_kinds_of_lists_are_listed_with_counts(tmp_path: Path) -> None:
    counts = json.loads(equipoise_command("list", "--json", cwd=tmp_path).stdout)
    lines = equipoise_command("list", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[kind, str(count)] for kind, count in counts.items()]
    for kind, count in counts.items():
        assert len(json.loads(equipoise_command("list", kind, "--json", cwd=tmp_path).stdout)) == count


def test_one_entry_of_a_list_is_shown_with_its_paper_and_all_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, one = (equipoise_command("list", "models", *name, cwd=tmp_path).stdout for name in ((), ("deq-mlp",)))
    assert "deq-cnn" in whole
    assert "anderson" not in whole
    assert "deq-cnn" not in one
    [entry] = json.loads(equipoise_command("list", "models", "deq-mlp", "--json", cwd=tmp_path).stdout)
    assert entry["paper"] in one
    assert 'solver = "anderson"' in one
    monkeypatch.setattr("tests.support.commands.WIDTH", 80)
    lines = equipoise_command("list", "models", "deq-mlp", cwd=tmp_path).stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for parameter in entry["parameters"]:
        assert any(line.startswith(f"  {parameter['name']}") for line in lines)
    wrong = equipoise_command("list", "models", "deq-mpl", cwd=tmp_path)
    one_sentence(wrong, 2, "'deq-mpl'", "did you mean 'deq-mlp'?")
