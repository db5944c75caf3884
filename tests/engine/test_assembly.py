"""The head of a model that an experiment names."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn

import equipoise as eq
from equipoise.config.experiment import Experiment
from equipoise.engine.assembly import experiment_task
from equipoise.models.base import BodyAndHead
from equipoise.runs.sweep import expand_sweep
from tests.support.commands import equipoise_command, one_sentence, small
from tests.support.odd_models import CLIENTS


def written(tmp_path: Path, **model: Any) -> Path:
    tables = small(model={"name": "mlp", "hidden": [8], **model}, algorithm={"name": "fedper"})
    tables["data"] = {"name": "digits-by-writer", "clients": 4}
    (tmp_path / "given.toml").write_text(tomli_w.dumps(tables))
    return tmp_path / "given.toml"


@pytest.mark.parametrize(
    ("head", "shared"),
    [(None, 785 * 8), ("head", 785 * 8), ("*.bias", 784 * 8 + 8 * 10), (["body.*", "head.bias"], 80), ([], 6370)],
)
def test_an_experiment_names_what_stays_on_the_client(head: Any, shared: int, tmp_path: Path) -> None:
    file = written(tmp_path, **({} if head is None else {"head": head}))
    parsed = Experiment.load(file)
    assert Experiment.parse(parsed.tables()) == parsed
    task = experiment_task(parsed, parsed.federation(tmp_path))
    assert task.space.body_size == shared
    assert task.head == ("head" if head in (None, "head") else None)


def test_a_head_of_patterns_on_the_command_line(tmp_path: Path) -> None:
    file = written(tmp_path, head=["*.bias", "head"])
    run = lambda *words: equipoise_command("run", file, "--out", "run", "--quiet", *words, cwd=tmp_path)  # noqa: E731
    one_sentence(run("--set", "model.head=fc*"), 2, "head='fc*' matches no parameter of the model; its parts are body")
    one_sentence(run("--set", "algorithm.name=knn-per"), 2, "here it is body.1.bias, head.weight, head.bias;")
    done = run()
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["parameters_shared"] == 784 * 8
    assert 'head = [\n    "*.bias",\n    "head",\n]' in (tmp_path / "run" / "run.toml").read_text()
    one_sentence(run("--resume", "--set", "model.head=head"), 2, "had model.head = ['*.bias', 'head'], not 'head'")
    models = []
    for client in (0, 1):
        done = equipoise_command("export", "run", "--client", client, "--out", f"{client}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        models.append(dict(eq.load_model(tmp_path / f"{client}").named_parameters()))
    same = {name for name in models[0] if torch.equal(models[0][name], models[1][name])}
    assert same == {"body.1.weight"}


def test_a_list_of_patterns_is_one_value_of_a_sweep() -> None:
    def heads(value: list[Any]) -> list[Any]:
        return [cell.experiment.head for cell in expand_sweep(small(model={"head": value}))[0]]

    assert heads(["*.bias", "head"]) == [("*.bias", "head")]
    assert heads([["*.bias"], ["head"]]) == [("*.bias",), ("head",)]


class Wrapper(nn.Module):
    """Hands over names that it does not have, as modules with adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BodyAndHead(nn.Linear(4, 4), nn.Linear(4, 3))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_head_is_found_by_its_full_name_only() -> None:
    assert hasattr(Wrapper(), "head")
    with pytest.raises(eq.EquipoiseError, match="FedPer needs to know the model's head; name the submodule"):
        eq.train(Wrapper(), CLIENTS, eq.FedPer(), rounds=1)
    for algorithm, head, shared in ((eq.FedPer(), "inner.head", 20), (eq.FedAvg(), "head", 35)):
        assert eq.train(Wrapper(), CLIENTS, algorithm, head=head, rounds=1).summary["parameters_shared"] == shared
