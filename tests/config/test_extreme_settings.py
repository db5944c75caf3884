"""Settings that are absurdly large, long or deep: one short sentence each, before anything is allocated."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from equipoise.cli import app as program
from equipoise.config.experiment import Experiment, override
from equipoise.engine.assembly import experiment_module
from equipoise.errors import EquipoiseError, first_line, sentence_of
from equipoise.models.transformers import Transformer
from equipoise.runs.sweep import expand_sweep
from equipoise.storage.run_folder import read_toml
from tests.support.commands import equipoise_command, one_sentence, small


def sentence(error: BaseException) -> str:
    assert "\n" not in str(error)
    assert len(str(error)) < 2000
    return str(error)


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"a = {deep(3000)}", "nested too deeply"),
        (f"a = {deep(40)}", "nested too deeply"),
        (f"a{'.a' * 3000} = 1", "nested too deeply"),
        (f"a = {'9' * 5000}", "is not valid TOML"),
        ('"a\\nb" = 1', r"has the key 'a\\nb', which is not one short line of text"),
        (f"{'a' * 300} = 1", "which is not one short line of text"),
        (f'[x]\n"{"a" * 300}" = 1', "which is not one short line of text"),
    ],
)
def test_odd_toml_gets_a_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(EquipoiseError) as caught:
        read_toml(tmp_path / "a.toml")
    assert words.replace("\\\\", "\\") in sentence(caught.value)


def test_an_odd_value_on_the_command_line_gets_a_sentence() -> None:
    with pytest.raises(EquipoiseError, match=r"--set model.hidden is not allowed; its value is nested too deeply"):
        override({}, [f"model.hidden={deep(3000)}"])
    assert len(override({}, [f"seed={'9' * 5000}"])["seed"]) == 5000  # text, which is refused later


EXTREME: list[tuple[str, str, Any, str]] = [
    ("engine", "workers", 2**63 - 1, "it must be a whole number >= 0 and <= 2048"),
    ("algorithm", "lr", 1e39, "it must be a number > 0 and <= 1e+30"),
    ("algorithm", "weight_decay", 1e300, "it must be a number >= 0 and <= 1e+30"),
    ("privacy", "target_epsilon", 1e300, "it must be a number > 0 and <= 1e+09 or left out"),
    ("", "rounds", 10**10, "rounds = 10000000000 is not allowed; it must be a whole number >= 1 and <= 1e+09"),
    ("", "seed", -(10**5000), "seed = a number of thousands of digits is not allowed"),
    ("algorithm", "name", "a" * 10**6, "is unknown; available"),
    ("algorithm", "batch", ["a" * 10**6], "algorithm.batch = ['aaaaaaaa"),
    ("data", "partition", "a" * 10**6, "is not allowed; it must be a table such as"),
    ("model", "a" * 200, 1, "unknown setting model.aaa"),
]


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    EXTREME,
    ids=[f"{section}.{key[:20]}" for section, key, *_ in EXTREME],
)
def test_an_extreme_setting_gets_a_sentence(section: str, key: str, value: Any, words: str) -> None:
    tables = small(**({"privacy": {"clip": 1.0}} if section == "privacy" else {}))
    at = tables.setdefault(section, {}) if section else tables
    at[key] = value
    with pytest.raises(EquipoiseError) as caught:
        Experiment.parse(tables)
    assert words in sentence(caught.value)


def test_generous_limits_are_mentioned_to_those_who_exceed_them_only() -> None:
    allowed = {row["name"]: row["allowed"] for row in Transformer.describe()}
    assert allowed["layers"] == "a whole number >= 1"
    with pytest.raises(EquipoiseError, match=r"layers = 0 is not allowed; it must be a whole number >= 1$"):
        Transformer(layers=0)
    with pytest.raises(EquipoiseError, match=r"layers = 5000 .* >= 1 and <= 2000$"):
        Transformer(layers=5000)


@pytest.mark.parametrize("hidden", [[10**9], [10**9, 10**9], [10**9] * 3])
def test_a_model_that_cannot_fit_into_memory_is_refused_before_it_is_built(hidden: list[int]) -> None:
    experiment = Experiment.parse(small(model={"name": "mlp", "hidden": hidden}))
    with pytest.raises(EquipoiseError, match="the model does not fit into the memory of this machine") as caught:
        experiment_module(experiment, (1000,), 10)
    assert "make [model] smaller" in sentence(caught.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (MemoryError(), "there is not enough memory (MemoryError); use a smaller model"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (OverflowError("int too large"), "a number in the settings is too large (int too large)"),
        (RuntimeError("value cannot be converted to type float without overflow"), "such as algorithm.lr"),
        (RuntimeError("can't start new thread"), "set engine.workers to a smaller number"),
    ],
)
def test_errors_of_python_and_torch_end_the_program_with_a_sentence(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(program, "app", fail)
    with pytest.raises(SystemExit) as caught:
        program.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("something else")

    assert sentence_of(RuntimeError("something else")) is None
    monkeypatch.setattr(program, "app", fail)
    with pytest.raises(RuntimeError, match="something else"):
        program.main()


def test_a_long_text_is_shortened_to_its_first_line() -> None:
    assert first_line(ValueError("\n  one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("a" * 1000)) == "a" * 297 + "..."


def test_the_program_says_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(f"a = {deep(3000)}")
    one_sentence(equipoise_command("run", "deep.toml", cwd=tmp_path), 2, "nested too deeply")
    (tmp_path / "wide.toml").write_text(tomli_w.dumps(small(model={"name": "mlp", "hidden": [10**9] * 2})))
    one_sentence(equipoise_command("run", "wide.toml", "--quiet", cwd=tmp_path), 2, "make [model] smaller")


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert str(EquipoiseError("one\n  two")) == "one two"
    long = str(EquipoiseError("begin " + "x" * 10_000 + " end"))
    assert len(long) < 1600
    assert long.startswith("begin xxx")
    assert long.endswith("xxx end")
    assert EquipoiseError().args == ()


def test_a_sweep_of_too_many_runs_is_refused_before_they_are_listed() -> None:
    values = list(range(1, 10_001))
    tables = small(rounds=values, algorithm={"name": "fedavg", "batch": values})
    with pytest.raises(EquipoiseError, match=r"the file describes 1e\+08 runs; it must be at most 100,000"):
        expand_sweep(tables)
