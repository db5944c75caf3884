"""What the documentation says can be done."""

import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import equipoise
from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.attacks import ATTACKS
from equipoise.callbacks import CALLBACKS, Callback
from equipoise.config.deployment import Deploy
from equipoise.config.device_classes import Devices
from equipoise.config.experiment import Experiment
from equipoise.data.partitions import PARTITIONS
from equipoise.data.sources import SOURCES
from equipoise.equilibrium import SOLVERS
from equipoise.errors import EquipoiseError
from equipoise.metrics import METRICS, find_metrics
from equipoise.models import MODELS
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import REDUCERS
from equipoise.reproduction.exhibits import Exhibit, exhibits, find, own
from equipoise.reproduction.result_views import Axis, Figure, View
from equipoise.runs.sweep import expand_sweep
from equipoise.settings import read
from equipoise.storage.run_folder import read_toml
from tests.support.commands import ROOT, equipoise_command
from tests.support.odd_models import CLIENTS
from tests.support.problems import simulation


def blocks(file: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_readmes_commands_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [
        line for block in blocks("README.md", "sh") for line in block.splitlines() if line.startswith("equipoise")
    ]
    assert len(commands) >= 5
    for command in commands:
        arguments = shlex.split(command, comments=True)[1:]
        if arguments[0] == "deploy":  # tests/flower/test_deployment.py starts one
            continue
        if arguments[0] in ("run", "sweep"):
            arguments += ["--set", "rounds=2"]
        done = equipoise_command(*arguments, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.slow
def test_the_skeleton_in_contributing_is_an_algorithm() -> None:
    [code] = blocks("CONTRIBUTING.md", "python")
    names: dict[str, object] = {"__name__": "skeleton"}
    exec(code, names)
    cls = names["Mine"]
    assert isinstance(cls, type)
    assert issubclass(cls, Algorithm)
    runs = [simulation(cls(lr=0.05, batch=4), mode=mode) for mode in ("threads", "stacked")]
    for run in runs:
        run.run()
    torch.testing.assert_close(runs[0].server.w, runs[1].server.w, rtol=1e-9, atol=1e-11)


def test_every_algorithm_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name, cls in ALGORITHMS.items():
        assert f"| `{name}` | `{cls.__module__.rsplit('.', 1)[1]}.py` |" in text


def test_the_guide_names_every_metric() -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    table = text[text.index("### Metrics") : text.index("**Stop and resume.**")]
    for name in METRICS:
        assert f"`{name}`" in table
    [code] = [block for block in blocks("docs/guide.md", "python") if "metric=[" in block]
    names: dict[str, object] = {}
    exec(code.partition("result =")[0], names)
    (metric,) = find_metrics([names["top3"]])  # type: ignore[list-item]
    assert metric.name == "top3"


def test_the_readme_names_what_there_is() -> None:
    text = (ROOT / "README.md").read_text()
    for name in (*MODELS, *PARTITIONS):
        assert f"`{name}`" in text


@pytest.mark.slow
def test_the_page_on_data_names_what_there_is_and_its_commands_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    for name in (*SOURCES, *PARTITIONS):
        assert f"| `{name}` |" in text
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks("docs/data.md", "sh"):
        for command in block.splitlines():
            done = equipoise_command(*shlex.split(command)[1:], cwd=tmp_path)
            assert done.returncode == 0, (command, done.stderr)
    for block in blocks("docs/data.md", "toml"):
        tables = {"data": {"name": "mnist", **tomllib.loads(block)}, "model": {"name": "mlp"}}
        Experiment.parse({**tables, "algorithm": {"name": "local"}})


def test_the_page_on_deployments_names_the_settings() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    table = text[text.index("## Settings") : text.index("## What is protected")]
    for name in Deploy.model_fields:
        assert f"`{name}`" in table
    [code] = [block for block in blocks("docs/deploy.md", "python") if "App(" in block]
    compile(code, "deploy.md", "exec")


@pytest.mark.slow
def test_the_page_on_privacy_names_the_settings_and_its_commands_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "privacy.md").read_text()
    for name in Privacy.model_fields:
        assert f"| `{name}` |" in text
    for table in map(tomllib.loads, blocks("docs/privacy.md", "toml")):
        read(Privacy, table["privacy"], "privacy")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in "".join(blocks("docs/privacy.md", "sh")).replace("\\\n", " ").splitlines():
        short = ["--set", "rounds=2"] if " run " in command else ["--shadows", "4"] if " audit " in command else []
        done = equipoise_command(*shlex.split(command, comments=True)[1:], *short, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.slow
def test_the_page_on_papers_names_every_key_and_its_commands_and_its_example_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reproduce.md").read_text()
    table = text[text.index("| key of an exhibit |") :]
    for field in fields(Exhibit):
        assert f"`{field.name}`" in table or field.name in ("place", "paper")
    for command in blocks("docs/reproduce.md", "sh")[0].splitlines():
        done = equipoise_command(*shlex.split(command, comments=True)[1:], cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    views, written, tables = blocks("docs/reproduce.md", "toml")
    for name, view in tomllib.loads(views).items():
        read(View, view, name)
    for name in (*View.model_fields, *Figure.model_fields, *Axis.model_fields):
        assert f"`{name}`" in text or f"{name}," in text or f", {name} }}" in text, name
    (tmp_path / "papers" / "mine" / "paper").mkdir(parents=True)
    (tmp_path / "papers" / "mine" / "exhibits.toml").write_text(written)
    (tmp_path / "papers" / "mine" / "paper" / "tables.toml").write_text(tables)
    exhibit = find("mine-table1", tmp_path / "papers")
    assert exhibit.published() == {"fedavg": [(61.2, 0.4), (70.1, 0.3)], "ditto strong": [(93.0, None), (88.5, None)]}
    assert set(exhibit.published()) == {row.key for row in exhibit.rows}


@pytest.mark.slow
def test_the_commands_of_the_page_on_reports_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [line for block in blocks("docs/report.md", "sh") for line in block.splitlines() if "pip" not in line]
    assert len(commands) == 7
    for command in commands:  # the last one follows a run that is over by then
        arguments = shlex.split(command.removesuffix("&"))[1:]
        short = ["--set", "rounds=2"] if arguments[0] == "run" else []
        done = equipoise_command(*arguments, *short, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    [track] = [tomllib.loads(block) for block in blocks("docs/report.md", "toml")]
    Experiment.parse(tomllib.loads((ROOT / "examples" / "digits.toml").read_text()) | track)


def test_what_is_said_of_papers_names_exhibits_that_there_are(tmp_path: Path) -> None:
    known = exhibits(own())
    named = []
    for page in ("README.md", *(f"docs/results/{name}.md" for name in ("README", "flame", "fedeq"))):
        named += re.findall(r"`equipoise reproduce ([^`]+)`", (ROOT / page).read_text())
    assert len(named) > 25
    for words in named:
        name, *options = words.split()
        known[name].chosen([part for option, part in pairwise(options) if option == "--only"])
        assert set(options) & {"--only", "--scale", "--jobs", "--seeds", "--published"} or not options


def test_the_page_on_equilibria_runs_and_names_what_there_is() -> None:
    text = (ROOT / "docs" / "equilibrium.md").read_text()
    names: dict[str, object] = {"__name__": "page"}
    for code in blocks("docs/equilibrium.md", "python"):
        exec(code, names)
    for word in (*SOLVERS, *(name for name in MODELS if name.startswith("deq-") and name != "deq-mlp")):
        assert f"`{word}`" in text
    devices, table = (tomllib.loads(block) for block in blocks("docs/equilibrium.md", "toml"))
    read(Devices, devices["devices"], "devices")
    model = table["model"]
    read(MODELS[model.pop("name")], model, "model")


@pytest.mark.slow
def test_the_published_counts_of_parameters_are_those_of_the_models() -> None:
    text = (ROOT / "docs" / "equilibrium.md").read_text()

    def count(name: str, shape: tuple[int, ...], outputs: int, of: str, **given: int) -> int:
        module = MODELS[name](**given).build(shape, outputs)
        return sum(p.numel() for p in (module if of == "all" else getattr(module, of)).parameters())

    kinds = (((1, 28, 28), 62), ((3, 32, 32), 10), ((3, 32, 32), 100))
    for name in ("deq-resnet-s", "deq-resnet-m", "resnet-14", "resnet-20", "resnet-34"):
        assert f"| `{name}` | " + " | ".join(f"{count(name, *kind, 'body'):,}" for kind in kinds) + " |" in text
    for name in ("deq-transformer", "transformer-8"):
        assert f"{count(name, (80,), 90, 'body'):,}" in text
    peers = {"deq-residual": ("resnet-5-blocks", {}), "deq-cnn": ("cnn-L", {"layers": 10})}
    for name, words, given in (
        *(("deq-residual", f"{k} block{'s' if k > 1 else ''}", {"blocks": k}) for k in (1, 2, 3)),
        ("deq-cnn", "4 layers", {"layers": 4}),
    ):
        peer, theirs = peers[name]
        found, most = count(name, *kinds[1], "all", **given), count(peer, *kinds[1], "all", **theirs)
        assert f"| `{name}`, {words} | {found:,} | {100 * (1 - found / most):.1f} % |" in text
        assert f"| {most:,} |" in text


def test_the_example_of_an_equilibrium_learns(capsys: pytest.CaptureFixture) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "equilibrium.py"))
    assert example["main"](epochs=4) > 0.5
    assert "iterations per sample" in capsys.readouterr().out


def test_the_example_of_an_equilibrium_on_cifar_10_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rng = np.random.default_rng(0)
    for name, n in (("data_batch_1.bin", 128), ("data_batch_2.bin", 64), ("test_batch.bin", 64)):
        records = rng.integers(0, 256, (n, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (tmp_path / name).write_bytes(records.tobytes())
    example = runpy.run_path(str(ROOT / "examples" / "equilibrium_cifar10.py"))
    x, y, test_x, _ = example["read"](tmp_path)
    assert (len(x), len(y), len(test_x)) == (192, 192, 64)
    accuracy = example["main"](["--data", str(tmp_path), "--epochs", "1", "--images", "128", "--channels", "16"])
    assert 0 <= accuracy <= 1
    assert "spectral radius at the fixed point" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has neither"):
        example["read"](tmp_path / "nothing")
    for wrong in (["--epochs", "0"], ["--images", "32"]):
        with pytest.raises(SystemExit, match=f"{' '.join(wrong)} is not allowed"):
            example["main"](["--data", str(tmp_path), *wrong])


def test_equilibrium_layers_load_nothing_of_federations() -> None:
    code = "import sys, equipoise.equilibrium; print(*(m for m in sys.modules if m.startswith(('equipoise', 'flwr'))))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = {".".join(name.split(".")[:2]) for name in loaded}
    assert rooms <= {"equipoise", *(f"equipoise.{room}" for room in ("equilibrium", "errors", "settings"))}


def test_the_guides_examples_of_partial_sharing_run() -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    section = text[text.index("## Sharing parts of a model") : text.index("### LoRA")]
    [code], [table] = (re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL) for language in ("python", "toml"))
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    names = {"eq": equipoise, "nn": nn, "module": module, "clients": CLIENTS}
    exec(code, names)
    assert names["result"].summary["parameters_personal"] == 10
    tables = tomllib.loads(table) | {"data": {"name": "mnist"}, "algorithm": {"name": "fedper"}}
    assert Experiment.parse(tables).head == ("*.bias", "head")


@pytest.mark.slow
def test_the_example_of_adapters_shares_what_it_says(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("peft", reason="needs peft, the extra [lora]")
    example = runpy.run_path(str(ROOT / "examples" / "lora.py"))
    table = example["main"](rounds=1, size=20)
    everything, both, only_a, nothing = table.values()
    assert both["parameters_shared"] == only_a["parameters_shared"] + only_a["parameters_personal"]
    assert nothing["parameters_personal"] == both["parameters_shared"] < everything["parameters_shared"] / 5
    assert nothing["bytes_a_round"] == 0 < only_a["bytes_a_round"] < both["bytes_a_round"]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(table)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_are_experiments(path: Path) -> None:
    assert expand_sweep(read_toml(path))[0]


def test_a_file_for_many_runs_says_how_to_run_it() -> None:
    with pytest.raises(EquipoiseError, match="start them with `equipoise sweep`"):
        Experiment.load(ROOT / "examples" / "sweep.toml")


def test_the_guide_names_every_callback_and_its_examples_work(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    section = text[text.index("## Callbacks") : text.index("## Models out of a run")]
    for name, cls in CALLBACKS.items():
        assert f"`{name}`" in section
        assert f"`{cls.__name__}`" in section
        for setting in cls.model_fields:
            assert f"`{setting}`" in section
    for hook in (name for name in vars(Callback) if name.startswith("on_") and name != "on_data_progress"):
        assert f"`{hook}" in section
    [own] = [block for block in blocks("docs/guide.md", "python") if "class EveryTenth" in block]
    [tables] = [block for block in blocks("docs/guide.md", "toml") if "[[callbacks]]" in block]
    (tmp_path / "mine.py").write_text(f"import equipoise as eq\n{own}")
    (tmp_path / "run.toml").write_text((ROOT / "examples" / "digits.toml").read_text() + "\n" + tables)
    options = ["--set", "rounds=2", "--set", "data.clients=4", "--out", "run", "--quiet"]
    done = equipoise_command("run", "run.toml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "best" / "personal.safetensors").exists()


def test_every_attack_and_reducer_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "robustness.md").read_text()
    for name in (*ATTACKS, *REDUCERS):
        assert f"| `{name}` |" in text


def test_the_published_seconds_and_megabytes_of_data_are_those_of_the_benchmark() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    for row in json.loads((ROOT / "docs" / "benchmarks" / "data.json").read_text())["data"]:
        columns = ("cold_seconds", "cached_seconds", "inputs_mb", "cold_peak_mb", "cached_peak_mb", "cache_mb")
        cells = [f"`{row['source']}`", f"{row['samples']:,}", *(str(row[column]) for column in columns)]
        assert "| " + " | ".join(cells) + " |" in text


def test_the_published_modes_are_those_of_the_benchmark() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    for row in json.loads((ROOT / "docs" / "benchmarks" / "modes.json").read_text())["modes"]:
        assert f"| {row['case']} | {row['small']:,} | {row['auto']} | {row['stacked_to_threads']} |" in text


def test_the_published_costs_of_a_deployment_are_those_of_the_benchmark() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    found = json.loads((ROOT / "docs" / "benchmarks" / "deploy.json").read_text())
    ways = [found["ways"][name] for name in ("cold", "warm", "fast_poll")]
    names = ("round", "client_from_order_to_answer", "client_app_an_order", "client_from_answer_to_order", "peak_mb")
    for name in names:
        assert f" | {' | '.join(str(way[name]) for way in ways)} |" in text, name
    assert f"| {found['to_cold']['warm']} | {found['to_cold']['fast_poll']} |" in text
    assert f"{found['seconds']['simulated_round']} s simulated" in text
    assert found["to_cold"]["warm"] <= 0.45
    assert found["memory_warm_to_cold"] < 1
    if "learn2pfed" in found:  # the long part of the benchmark, which writes its first figures before it
        assert f"{found['learn2pfed']['exchanges']} exchanges" in text
        for name in ("warm", "fast_poll"):
            assert f"{found['learn2pfed'][name]['seconds_per_exchange']} s per exchange" in text
    for way, row in found["bytes"].items():
        if way in ("up", "down"):
            counts = " | ".join(f"{row[k]:,}" for k in ("algorithm", "messages", "wire"))
            assert f"| {way} | {counts} | {row['wire_to_algorithm']} | {row['wire_to_messages']} |" in text


EQUILIBRIA = {
    "steps": (
        "step_s",
        "peak_mb",
        "process_mb",
        "iterations",
        "peer",
        "step_to_peer",
        "peak_to_peer",
        "process_to_peer",
    ),
    "flat": ("mb_5", "mb_50", "growth"),
    "solvers": ("iterations", "solve_s", "plain_to_this"),
    "torchdeq": ("step_s", "step_to_ours", "gradient_error", "solve_to_ours", "residual"),
    "gradients": ("cosine", "norm_ratio", "error", "step_s", "peak_mb"),
    "warm": ("iterations", "last_round_iterations", "iterations_to_cold", "train_s"),
}


def test_the_published_figures_are_those_of_the_benchmark_of_equilibria() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    found = json.loads((ROOT / "docs" / "benchmarks" / "equilibrium.json").read_text())
    for part, columns in EQUILIBRIA.items():
        for row in found[part]:
            first = [row["case"], *([f"{row['parameters']:,}"] if part == "steps" else [])]
            assert "| " + " | ".join([*first, *(str(row.get(key, "")) for key in columns)]) + " |" in text
    (projection,) = found["projection"]
    assert f"takes {projection['ms']} ms" in text
    assert f"{projection['sort_ms']} ms" in text


@pytest.mark.parametrize("name", ["throughput", "scale"])
def test_the_published_figures_are_those_of_the_benchmarks(name: str) -> None:
    """docs/performance.md shows what is in the JSON that the benchmark wrote, to the digit."""
    text = (ROOT / "docs" / "performance.md").read_text()
    result = json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())
    for row in result[name]:
        for key in ("ratio_to_usual", "share_of_ceiling", "ratio", "peak_memory_mb"):
            if key in row:
                assert f"{row[key]}" in text, (row.get("case"), key)


def test_the_published_comparison_with_other_simulators_is_that_of_the_benchmark() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    found = json.loads((ROOT / "docs" / "benchmarks" / "peers.json").read_text())
    for case, figures in found["cases"].items():
        rows = {name: row for name, row in figures.items() if isinstance(row, dict)}
        for name, row in rows.items():
            cells = [
                case,
                name,
                f"{row['samples_per_second']:,}",
                row["ratio_of_equipoise"],
                row["threads_per_process"],
            ]
            cells.append(next(value for key, value in row.items() if key.startswith("loss_after_")))
            assert "| " + " | ".join(map(str, cells)) + " |" in text, (case, name)


def test_the_guides_example_from_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = [block for block in blocks("docs/guide.md", "python") if "newcomers" in block]
    names: dict[str, object] = {"__name__": "guide"}
    exec(code, names)
    assert (tmp_path / "newcomers" / "dora.safetensors").exists()


@pytest.mark.slow
def test_the_commands_of_the_page_on_forecasting_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = "".join(blocks("docs/forecasting.md", "sh")).splitlines()
    assert len(commands) >= 9
    for command in commands:
        if "learn2pfed" in command:  # the experiments of the second part take minutes
            continue
        done = equipoise_command(*shlex.split(command)[1:], cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    for name in ("forecasts.csv", "next.csv", "forecast.svg"):
        assert (tmp_path / name).stat().st_size > 0
    model = equipoise.load_model(tmp_path / "bakery.safetensors", own_unit=True)
    assert model(torch.zeros(1, 73)).shape == (1, 24)


def test_the_page_on_forecasting_shows_the_example() -> None:
    [table] = blocks("docs/forecasting.md", "toml")
    assert tomllib.loads(table) == read_toml(ROOT / "examples" / "forecast.toml")
