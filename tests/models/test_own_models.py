"""The user's own models, with settings that are checked like those of the package."""

from pathlib import Path

import pytest
from torch import nn

from equipoise.config.experiment import Experiment
from equipoise.engine.assembly import experiment_task
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.models.base import ModelSettings
from equipoise.registry import choose
from tests.support.commands import is_one_sentence, small
from tests.support.own_code import write_code

EXTRA = '''
from torch import nn

from equipoise import ModelSettings


class Mine(ModelSettings):
    """Settings of my own."""

    width: int = 2

    def build(self, shape, outputs):
        return nn.Sequential(nn.Linear(*shape, self.width), nn.Linear(self.width, outputs))


def function(outputs, *, inputs: int = 5, times: int = 3):
    """A function."""
    return nn.Linear(inputs, outputs * times)


class Child(nn.Linear):
    def __init__(self, wide: bool = False):
        super().__init__(3, 2)


class Grandchild(Child):
    pass


def nothing():
    return 3


def fails():
    return nn.Linear(-1, 2)


def takes_name(name):
    return nn.Linear(1, 1)


module = nn.Linear(1, 1)
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (write_code(tmp_path) / "extra.py").write_text(EXTRA)
    return tmp_path


def model(name: str, **settings: object) -> ModelSettings:
    return choose(MODELS, {"name": name, **settings}, "model")[1]


def test_a_class_of_modules_has_checked_settings(code: Path) -> None:
    name = f"{code}/net.py:Net"
    made = model(name, hidden=7, sizes=[3])
    module = made.build((2, 3), 5)
    assert isinstance(module, nn.Module)
    assert [tuple(p.shape) for p in module.parameters()] == [(7, 6), (7,), (5, 7), (5,)]
    assert made.table() == {"hidden": 7, "sizes": [3]}
    assert model(name, hidden=7, sizes=[3]) == made
    for settings, words in (
        ({"hiden": 3}, "unknown setting model.hiden; did you mean 'hidden'?"),
        ({"hidden": 3.5}, "model.hidden = 3.5 is not allowed; it must be a whole number"),
        ({"activation": 3}, "unknown setting model.activation"),
        ({"shape": [3]}, "unknown setting model.shape"),
        ({"head": 3}, "model.head = 3 is not allowed; it must be a string or a list, each a string"),
    ):
        with pytest.raises(EquipoiseError) as caught:
            model(name, **settings)
        is_one_sentence(caught.value, words)


def test_a_function_and_a_class_of_settings_and_inherited_arguments(code: Path) -> None:
    assert [p.shape[0] for p in model(f"{code}/extra.py:function", times=2).build((1,), 4).parameters()] == [8, 8]
    assert len(list(model(f"{code}/extra.py:Mine", width=3).build((2,), 4).parameters())) == 4
    assert model(f"{code}/extra.py:Grandchild", wide=True).table() == {"wide": True}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "returned int; it must return an nn.Module"),
        ("fails", "cannot be built: RuntimeError"),
        ("takes_name", "has an argument 'name', which cannot be a setting"),
        ("module", "is of type Linear; it must be an nn.Module class"),
    ],
)
def test_code_that_makes_no_model_brings_a_sentence(name: str, words: str, code: Path) -> None:
    with pytest.raises(EquipoiseError) as caught:
        model(f"{code}/extra.py:{name}").build((1,), 1)
    is_one_sentence(caught.value, "model.name = ", words)


@pytest.mark.parametrize(("head", "size"), [("last", 4), (["first", "last"], 4 + 33), ("head", 0)])
def test_the_setting_head_names_the_head(head: object, size: int, code: Path, tmp_path: Path) -> None:
    tables = small(model={"name": f"{code}/net.py:Net", "hidden": 3, "head": head})
    experiment = Experiment.parse(tables)
    space = experiment_task(experiment, experiment.federation(tmp_path)).space
    assert space.size - space.body_size == size


def test_a_head_that_is_not_there_brings_a_sentence(code: Path, tmp_path: Path) -> None:
    experiment = Experiment.parse(small(model={"name": f"{code}/net.py:Net", "head": "lats"}))
    with pytest.raises(EquipoiseError, match="head='lats' matches no parameter of the model; did you mean 'last'"):
        experiment_task(experiment, experiment.federation(tmp_path))
