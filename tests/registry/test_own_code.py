"""Names of own code and of plug-ins: found where they should be, refused where they must not be."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.algorithms import ALGORITHMS
from equipoise.algorithms.base import Algorithm
from equipoise.data.partitions import PARTITIONS
from equipoise.errors import EquipoiseError
from equipoise.models import MODELS
from equipoise.registry import allow_only, choose, installed, load_object, short_name, use_folders
from tests.support.commands import is_one_sentence
from tests.support.own_code import MINE, write_code


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test makes importable is gone after it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("equipoise.", "torch", "numpy")):
            del sys.modules[name]


def test_a_file_is_found_beside_the_experiment_and_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "code.py").write_text(f"place = {place!r}\n")
    monkeypatch.chdir(tmp_path / "here")
    assert load_object("code.py:place", "x") == "here"
    with use_folders([tmp_path / "there"]):
        assert load_object("code.py:place", "x") == "there"
    assert load_object(f"{tmp_path / 'there' / 'code.py'}:place", "x") == "there"
    with use_folders([tmp_path / "nowhere"]):
        assert load_object("code.py:place", "x") == "here"
    assert load_object("code.py:place", "x") == "here", "the folders are those of the block"


def test_a_module_is_found_beside_the_experiment_and_before_installed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text("value = 3\n")
    with use_folders([tmp_path]):
        assert load_object("package.inner:value", "x") == 3
    assert sys.path[-1] == str(tmp_path), "it does not hide what is installed"


def test_a_file_may_import_what_lies_beside_it_also_later(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("value = 1\n")
    (tmp_path / "later_on.py").write_text("value = 2\n")
    (tmp_path / "code.py").write_text("import beside_it\ndef f():\n    import later_on\n    return later_on.value\n")
    assert load_object(f"{tmp_path / 'code.py'}:f", "x")() == 2


def test_two_files_of_one_name_are_two_modules_and_a_file_is_imported_once(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "code.py").write_text("class C: pass\n")
    one, two = (load_object(f"{tmp_path / place / 'code.py'}:C", "x") for place in ("a", "b"))
    assert one is not two
    assert one is load_object(f"{tmp_path / 'a' / 'code.py'}:C", "x")
    assert one.__module__ != two.__module__


BAD = {
    "nowhere.py:C": ("x names the file 'nowhere.py', which does not exist in",),
    "code.py:Clas": ("there is no Clas in code.py; did you mean 'Class'?",),
    "code.py:": ("own code is 'package.module:Name' or 'file.py:Name'",),
    ":C": ("own code is",),
    "code.py:a.b": ("own code is",),
    "no_such_module:C": ("cannot be imported: ModuleNotFoundError",),
    "raises.py:C": ("cannot be imported: ZeroDivisionError: division by zero",),
    "leaves.py:C": ("cannot be imported: SystemExit",),
    "broken.py:C": ("cannot be imported: SyntaxError",),
    "lines.py:C": ("cannot be imported: ValueError: first",),
}


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_cannot_be_meant_brings_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in {
        "code": "class Class: pass",
        "raises": "1 / 0",
        "leaves": "raise SystemExit(3)",
        "broken": "def (",
        "lines": "raise ValueError('first\\nsecond')",
    }.items():
        Path(f"{file}.py").write_text(text + "\n")
    with pytest.raises(EquipoiseError) as caught:
        load_object(name, "x")
    is_one_sentence(caught.value, "x", *BAD[name])
    with pytest.raises(EquipoiseError):
        load_object(name, "x")  # a module that failed is not there half


def test_what_is_not_of_the_kind_is_told_with_what_would_be(tmp_path: Path) -> None:
    code = write_code(tmp_path)
    for registry, name, words in (
        (ALGORITHMS, "net.py:Net", "is the class Net; it must be a class that derives from equipoise.Algorithm"),
        (MODELS, "mine.py:Mine", "it must be an nn.Module class, a function that returns a module, or a class"),
        (PARTITIONS, "blobs.py:make", "is of type function; it must be a class that derives from equipoise.Partition"),
    ):
        with pytest.raises(EquipoiseError) as caught:
            registry.find(f"{code}/{name}", "section.name")
        is_one_sentence(caught.value, "section.name = ", words)


def test_an_own_algorithm_has_checked_settings(tmp_path: Path) -> None:
    name = f"{write_code(tmp_path)}/mine.py:Mine"
    found, mine = choose(ALGORITHMS, {"name": name, "lam": 1.0, "rates": [0.3]}, "algorithm")
    assert (found, mine.lam, mine.rates) == (name, 1.0, (0.3,))
    for key, value, words in (
        ("lamb", 1.0, "unknown setting algorithm.lamb; did you mean 'lam'?"),
        ("lam", -1.0, "algorithm.lam = -1.0 is not allowed; it must be a number >= 0"),
    ):
        with pytest.raises(EquipoiseError, match=words.replace("?", r"\?")):
            choose(ALGORITHMS, {"name": name, key: value}, "algorithm")


def test_classes_of_one_name_do_not_share_their_training(tmp_path: Path) -> None:
    ours = ALGORITHMS["fedavg"]().training_settings()
    theirs = ALGORITHMS.find(f"{write_code(tmp_path)}/mine.py:FedAvg", "x")().training_settings()
    assert ours["by"] != theirs["by"]


def test_where_only_given_objects_are_allowed_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath('sprung').touch()\nclass C: pass\n")
    monkeypatch.chdir(tmp_path)
    for name in ("trap.py:C", "trap:C", f"{tmp_path}/trap.py:C", "os:system"):
        with use_folders([tmp_path]), allow_only({"other.name": int}), use_folders([tmp_path]):
            with pytest.raises(EquipoiseError) as caught:
                load_object(name, "algorithm.name")
            is_one_sentence(caught.value, "algorithm.name = ", "a deployment imports no code by name", "App(...)")
            assert load_object(name, "other.name") is int
    assert not Path("sprung").exists()
    assert "trap" not in sys.modules
    load_object("trap.py:C", "x")
    assert Path("sprung").exists(), "the trap works"


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with an algorithm, a model that cannot be imported, and a name that we have too."""
    site = tmp_path / "site"
    (site / "scaffolds").mkdir(parents=True)
    (site / "scaffolds" / "__init__.py").write_text("")
    (site / "scaffolds" / "mine.py").write_text(MINE.replace("from helper import strength", "strength = abs"))
    info = site / "scaffolds-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scaffolds\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(
        "[equipoise.algorithms]\nmine = scaffolds.mine:Mine\nditto = scaffolds.mine:Mine\n"
        "[equipoise.models]\nlost = scaffolds.nowhere:Net\n[equipoise.reducers]\nodd = scaffolds.mine:Mine\n"
    )
    monkeypatch.syspath_prepend(site)
    return site


def test_plug_ins_are_found_by_name_and_do_not_replace_ours(plugins: Path) -> None:
    assert list(installed("algorithms")) == ["mine", "ditto"]
    assert "scaffolds.mine" not in sys.modules, "looking imports nothing"
    found = ALGORITHMS.find("mine", "algorithm.name")
    assert issubclass(found, Algorithm)
    assert found.__module__ == "scaffolds.mine"
    assert ALGORITHMS.find("ditto", "algorithm.name") is ALGORITHMS["ditto"]
    with allow_only({}):
        assert ALGORITHMS.find("mine", "algorithm.name") is found, "the machine's owner installed it"
    with pytest.raises(EquipoiseError, match=r"algorithm\.name = 'mien' is unknown; did you mean 'mine'"):
        ALGORITHMS.find("mien", "algorithm.name")


def test_a_plug_in_that_is_broken_brings_a_sentence(plugins: Path) -> None:
    with pytest.raises(EquipoiseError) as caught:
        MODELS.find("lost", "model.name")
    is_one_sentence(caught.value, "model.name = 'lost' is a plug-in that cannot be imported: ModuleNotFoundError")


def test_short_names() -> None:
    assert [short_name(name) for name in ("ditto", "a/b.py:C", "a.b:C")] == ["ditto", "C", "C"]


def test_a_file_without_a_name_in_it_brings_a_sentence() -> None:
    with pytest.raises(
        EquipoiseError, match=r"model.name = 'nets.py' is a file; say what in it, such as 'nets.py:Name'"
    ):
        MODELS.find("nets.py", "model.name")
