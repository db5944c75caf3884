"""Runs, their folders and the command line in odd situations, each of which once went wrong."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.engine.assembly import experiment_task
from tests.support import datafiles
from tests.support.commands import SMALL, equipoise_command, one_sentence
from tests.support.odd_models import CLIENTS, module
from tests.support.problems import simulation


def test_resuming_with_other_data_or_another_model_is_refused(tmp_path: Path) -> None:
    options = {"head": None, "out": tmp_path / "run"}
    eq.train(module(), CLIENTS, eq.FedAvg(), rounds=2, **options)
    other = [(x + 1, y) for x, y in CLIENTS]
    for given, clients, message in (
        (module(), other, "the inputs have other values"),
        (module(), CLIENTS[:3], "the clients differ: there are 3, and 4 in the saved run"),
        (nn.Linear(4, 3), CLIENTS, "parameter number 1 is 'weight' of shape"),
    ):
        with pytest.raises(eq.EquipoiseError, match=message):
            eq.train(given, clients, eq.FedAvg(), rounds=3, resume=True, **options)
    start = module()
    with torch.no_grad():
        start[0].weight.add_(1)
    with pytest.raises(eq.EquipoiseError, match="the initial weights differ: seed torch"):
        eq.train(start, CLIENTS, eq.FedAvg(), rounds=3, resume=True, **options)


def test_resume_keeps_the_folder_true(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL.format(rounds=3, name="local").replace("participation = 3", "participation = 1.0"))
    run = lambda *a: equipoise_command("run", file, "--out", "run", *a, cwd=tmp_path)  # noqa: E731
    assert run("--quiet").returncode == 0
    one_sentence(run("--resume", "--set", "participation=1"), 2, "had participation = 1.0, not 1")
    one_sentence(run("--resume", "--set", "rounds=1"), 2, "has done 3 rounds", "rounds = 1 is less")
    assert "rounds = 3" in (tmp_path / "run" / "run.toml").read_text()
    # broken off on its way to more rounds, it has no summary that could be taken for the new one
    from equipoise.config.experiment import Experiment
    from equipoise.engine.simulation import Simulation
    from equipoise.storage.run_folder import RunFolder

    experiment = Experiment.load(file, ["rounds=9"])
    federation = experiment.federation(tmp_path)
    with RunFolder.at_work(tmp_path / "run", experiment.tables(), resume=True) as folder:
        settings = (experiment.algorithm, experiment.schedule, experiment.engine)
        simulation = Simulation(experiment_task(experiment, federation), federation, *settings, folder)
        simulation.resume()
        simulation.advance()
        simulation.close()
    one_sentence(equipoise_command("compare", "run", cwd=tmp_path), 2, "the run is not finished")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    one_sentence(run("--resume", "--set", "rounds=9"), 2, "cannot be resumed: metrics.jsonl is missing")


def test_a_manifest_vouches_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = eq.Ditto(lr=0.05, batch=4)
    for change in (lambda m: {**m, "facts": {**m["facts"], "adaptation_samples": 7}}, lambda m: []):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        simulation(algorithm, folder=folder, rounds=4, checkpoint_every=2).run()
        (folder / "checkpoint" / "mine").mkdir()  # somebody's own folder there is left alone
        manifest = folder / "checkpoint" / "round-000004.json"
        manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
        run = simulation(algorithm, folder=folder, rounds=4, checkpoint_every=2, new=False)
        told: list[str] = []
        monkeypatch.setattr(run.callbacks, "on_message", told.append)
        run.resume()
        assert run.done == 2
        assert "cannot be used" in told[0]
        run.run()
        assert (folder / "checkpoint" / "mine").is_dir()


def test_states_of_any_type_survive_the_disk(tmp_path: Path) -> None:
    from equipoise.engine.client_store import ClientStore

    for dtype in (torch.bool, torch.float16, torch.bfloat16, torch.int16, torch.int64, torch.float64):
        state = eq.State(v=torch.tensor([1, 0, 1]).to(dtype), empty=torch.empty(0, dtype=dtype))
        folder = tmp_path / str(dtype)
        folder.mkdir()
        store = ClientStore(3, state, folder)
        store.put(1, state)
        store.flush()
        store.kept.remove(1)
        assert torch.equal(store.get(1).v, state.v)
        assert store.get(1).v.dtype == dtype


@pytest.mark.slow
def test_odd_paths_and_clients_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL.format(rounds=1, name="fedavg"))
    assert equipoise_command("run", file, "--out", "run", "--quiet", cwd=tmp_path).returncode == 0
    export = lambda *a: equipoise_command("export", "run", *a, cwd=tmp_path)  # noqa: E731
    one_sentence(export("--global", "--out", "."), 2, "it is a folder")
    one_sentence(export("--global", "--out", "small.toml/x"), 2, "cannot write small.toml/x")
    one_sentence(export("--client", "²", "--out", "x"), 2, "there is no client '²'")
    one_sentence(export("--client", "0", "--out", "x"), 2, "FedAvg has no personal models; ask for the global one")
    set_ = lambda *a: equipoise_command("run", file, *(x for s in a for x in ("--set", s)), cwd=tmp_path)  # noqa: E731
    one_sentence(set_("participation=60"), 2, "participation = 60 is more than the 6 clients")
    assert set_("participation=6").returncode == 0  # nothing was left behind that would be in the way
    one_sentence(set_("written.x=1"), 2, "--set written.x=1")
    one_sentence(set_("algorithm.steps=1000000000000"), 2, "algorithm.steps", "<= 1e+06")
    one_sentence(set_("model.name=lenet", "data.split=[0.5,0.5]"), 2, "data.split", "a list of 3")


def test_a_copy_of_a_run_is_no_second_seed(tmp_path: Path) -> None:
    import shutil

    from equipoise.reporting.comparison import compare
    from equipoise.storage.run_index import find_runs

    simulation_folder = tmp_path / "a"
    eq.train(module(), CLIENTS, eq.FedAvg(), head=None, rounds=1, out=simulation_folder)
    shutil.copytree(simulation_folder, tmp_path / "b")
    eq.train(nn.Linear(4, 3), CLIENTS, eq.FedAvg(), head=None, rounds=1, out=tmp_path / "c")
    rows = compare(find_runs([tmp_path]))
    assert [row["seeds"] for row in rows] == [1, 1]  # and another model is another row


@pytest.mark.slow
def test_a_run_toml_finds_its_data_again(tmp_path: Path) -> None:
    """Without --data, a run that is shown, run again, resumed or exported from looks where it found its data."""
    datafiles.mnist(tmp_path / "elsewhere" / "mnist")
    file = tmp_path / "mnist.toml"
    file.write_text(
        'rounds = 1\n[data]\nname = "mnist"\nclients = 4\npartition = { kind = "iid" }\n'
        '[model]\nname = "softmax"\n[algorithm]\nname = "fedavg"\n'
    )
    run = partial(equipoise_command, cwd=tmp_path)
    assert run("run", file, "--data", tmp_path / "elsewhere", "--out", "one", "--quiet").returncode == 0
    assert run("run", "one/run.toml", "--out", "two", "--quiet").returncode == 0
    assert run("show", "one/run.toml", "--out", "one.png").returncode == 0
    assert run("run", file, "--out", "one", "--set", "rounds=2", "--resume", "--quiet").returncode == 0
    assert run("export", "one", "--global", "--out", "model.safetensors").returncode == 0
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    gone = run("run", "one/run.toml", "--out", "three")
    assert gone.returncode == 2
    assert "which does not exist" in gone.stderr
    assert run("run", "one/run.toml", "--data", tmp_path / "gone", "--out", "three", "--quiet").returncode == 0
    odd = tmp_path / "odd.toml"
    odd.write_text("written = 3\n" + file.read_text())
    for command in (("run", odd, "--data", tmp_path / "gone", "--quiet"), ("run", odd, "--quiet"), ("show", odd)):
        assert "Traceback" not in run(*command).stderr
    assert run("run", file, "--set", "written=5").returncode == 2


def test_where_names_are_numbers_a_number_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    datafiles.electricity(tmp_path / "data" / "electricity.csv.gz")
    file = tmp_path / "loads.toml"
    file.write_text('rounds = 1\n[data]\nname = "electricity"\n[model]\nname = "mlp"\n[algorithm]\nname = "local"\n')
    run = partial(equipoise_command, cwd=tmp_path)
    assert run("run", file, "--out", "loads", "--quiet").returncode == 0
    assert "The model of 2 is" in run("export", "loads", "--client", "2", "--out", "m.safetensors").stdout
    assert "there is no client '3'" in run("export", "loads", "--client", "3", "--out", "m.safetensors").stderr
