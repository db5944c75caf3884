"""Files with one model, of the library or of one's own."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.engine.model_files import write_tensors_of_model
from tests.support.flower_memory import deployed, run
from tests.support.problems import classification, small_mlp


class Tied(nn.Module):
    """Two names for one weight, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("made", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) + self.kept.sum() + self.made.sum()


def write(path: Path, module: nn.Module) -> None:
    write_tensors_of_model(path, {name: t.clone() for name, t in module.state_dict().items()}, {})


@pytest.mark.parametrize("make", [Tied, small_mlp, lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()])
def test_a_model_of_ones_own_comes_back_bit_for_bit(make, tmp_path: Path) -> None:
    trained, given = make(), make()
    with torch.no_grad():
        for tensor in trained.parameters():
            tensor.normal_()
    before = {name: t.clone() for name, t in given.state_dict().items()}
    write(tmp_path / "model", trained)
    loaded = eq.load_model(tmp_path / "model", module=given)
    assert loaded.state_dict().keys() == trained.state_dict().keys()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert torch.equal(given.state_dict()[name], before[name]), name  # it is copied
    assert not loaded.training


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, r"holds a model of your own; give the module: load_model\('.*model', module=Net\(\)\)"),
        (nn.Linear, "module is the class Linear; create a module of it"),
        ("mlp", "module is of type str"),
        (nn.Linear(2, 3), r"its 'weight' has the shape \[3, 2\], and \[3, 3\] in the file"),
        (nn.Linear(3, 3, bias=False), r"the file has 'bias' of shape \[3\], and the module has not"),
        (nn.Sequential(nn.Linear(3, 3)), r"it has '0\.weight' of shape \[3, 3\], which is not in the file; .* has '"),
    ],
)
def test_another_module_is_refused_by_the_first_parameter_that_differs(module, words: str, tmp_path: Path) -> None:
    write(tmp_path / "model", nn.Linear(3, 3))
    with pytest.raises(eq.EquipoiseError, match=words):
        eq.load_model(tmp_path / "model", module)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("nothing")
    for path, words in (
        (tmp_path / "none", "cannot be read as a model"),
        (tmp_path / "text", "cannot be read as a model"),
        (tmp_path, "is not a file; name the .safetensors file of one model"),
        (None, "None is not a file"),
    ):
        with pytest.raises(eq.EquipoiseError, match=words):
            eq.load_model(path, nn.Linear(3, 3))  # type: ignore[arg-type]
    eq.train(small_mlp(), classification(), "fedavg", rounds=1).save(tmp_path / "saved")
    with pytest.raises(eq.EquipoiseError, match="it holds all models of a run, so load its folder with"):
        eq.load_model(tmp_path / "saved" / "models.safetensors", small_mlp())


def test_the_personal_model_of_a_deployment_is_loaded_into_ones_own_module(tmp_path: Path) -> None:
    app, grid = deployed(tmp_path / "app", classification(3), small_mlp(), {"name": "ditto"})
    done = run(app, grid, tmp_path / "out")
    shared = eq.load_model(tmp_path / "out" / "global.safetensors", small_mlp(seed=7))
    assert torch.equal(done.task.space.vector(shared, done.task.dtype), done.server.w)
    files = [next(Path(node.settings["state"]).glob("*/personal.safetensors")) for node in grid.nodes.values()]
    weights = [eq.load_model(file, small_mlp(seed=7)).head.weight for file in files]
    assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 3
    with pytest.raises(eq.EquipoiseError, match="give the module"):
        eq.load_model(files[0])
