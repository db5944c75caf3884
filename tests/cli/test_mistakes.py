"""Typical mistakes at the command line, and the sentences that they get."""

import json
from pathlib import Path

import pytest
import tomli_w

from tests.support.commands import equipoise_command, one_sentence, small

COMMANDS = ("", "run", "show", "watch", "compare", "plot", "report", "sweep", "reproduce", "record", "cka", "export")
COMMANDS += ("list", "demo", "data", "data list", "data get", "deploy", "deploy init", "deploy local", "deploy client")
COMMANDS += ("audit",)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment, a sweep and a run."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "small.toml").write_text(tomli_w.dumps(small()))
    (folder / "many.toml").write_text(tomli_w.dumps(small(algorithm=[{"name": "ditto"}, {"name": "local"}])))
    assert equipoise_command("run", "small.toml", "--out", "done", "--quiet", cwd=folder).returncode == 0
    return folder


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("run small.tml", ("there is no file small.tml; did you mean small.toml?",)),
        ("run done", ("done is the folder of a run", "equipoise run done/run.toml --out done --resume")),
        ("run .", (". is a folder; name a TOML file",)),
        ("show done", ("done is a folder; name a TOML file, such as done/run.toml",)),
        ("run many.toml", ("start them with `equipoise sweep`",)),
        ("run small.toml --set lr=0.1", ("unknown setting lr; did you mean algorithm.lr?",)),
        ("run small.toml --set lam=0.1", ("unknown setting lam; did you mean algorithm.lam?",)),
        ("run small.toml --set samples=5", ("did you mean data.samples?",)),
        ("run small.toml --set clip=1", ("did you mean algorithm.clip or privacy.clip?",)),
        ("run small.toml --set rouns=5", ("unknown setting rouns; did you mean 'rounds'?",)),
        ("run small.toml --set model=cnn", ("did you mean model.name = 'cnn'?",)),
        ("run small.toml --set algorithm.lr", ("it must be section.key=value",)),
        ("run small.toml --out done", ("done already holds a run; add --resume",)),
        ("sweep small.toml --scale smok", ("the file has no scale 'smok'",)),
        ("sweep many.toml --shard 0/8", ("--shard 0/8 is not allowed; it must be PART/PARTS",)),
        ("sweep many.toml --shard 9/8", ("--shard 9/8 is not allowed", "such as 2/8")),
        ("sweep many.toml --shard x", ("--shard x is not allowed",)),
        ("compare done/run.toml", ("is a file; name the folder of a run, such as done",)),
        ("export done --client 0 --out no/x.safetensors", ("cannot write no/x.safetensors: there is no folder no",)),
        ("plot done --out no/x.pdf", ("there is no folder no",)),
        ("reproduce flame-table33", ("did you mean 'flame-table3'?",)),
        ("list models mpl", ("did you mean 'mlp'?",)),
    ],
)
def test_a_mistake_gets_one_sentence_that_helps(words: str, answers: tuple[str, ...], place: Path) -> None:
    one_sentence(equipoise_command(*words.split(), cwd=place), 2, *answers)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("rn", "There is no command 'rn'; did you mean 'run'?"),
        ("data gte", "There is no command 'gte'; did you mean 'get'?"),
        ("deploy lokal", "There is no command 'lokal'; did you mean 'local'?"),
        (
            "run small.toml --rounds 5",
            "No such option: --rounds; settings are changed with --set, as in --set rounds=VALUE",
        ),
    ],
)
def test_a_wrong_command_or_option_gets_one_suggestion(words: str, answer: str, place: Path) -> None:
    done = equipoise_command(*words.split(), cwd=place)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == f"Error: {answer}"
    assert done.stderr.lower().count("did you mean") <= 1


def test_a_misspelt_option_is_still_suggested(place: Path) -> None:
    done = equipoise_command("run", "small.toml", "--resum", cwd=place)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "--set" not in done.stderr


@pytest.mark.parametrize("words", COMMANDS)
def test_help_prints_no_backslashes(words: str, place: Path) -> None:
    done = equipoise_command(*words.split(), "--help", cwd=place)
    assert done.returncode == 0
    assert "\\" not in done.stdout
    assert "Usage:" in done.stdout


def test_resuming_warns_about_a_missing_data_folder_only_if_the_data_are_read_from_it(
    place: Path, tmp_path: Path
) -> None:
    from equipoise.runs.launch import folder_of_data

    def warnings(name: str) -> list[str]:
        file = tmp_path / "run.toml"
        file.write_text(tomli_w.dumps({**small(), "data": {"name": name}, "written": {"data": "/nowhere/data"}}))
        told: list[str] = []
        assert folder_of_data(file, None, told.append) is None
        return told

    assert warnings("linear") == warnings("digits-by-writer") == []
    [text] = warnings("fashion-mnist")
    assert "/nowhere/data, which does not exist" in text
    done = equipoise_command("run", "small.toml", "--out", "done", "--resume", "--quiet", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words", ["show small.toml --json", "compare done --format json", "list --json", "data list --json"]
)
def test_json_is_all_that_is_printed(words: str, place: Path) -> None:
    done = equipoise_command(*words.split(), cwd=place)
    assert done.returncode == 0
    json.loads(done.stdout)


@pytest.mark.parametrize(
    "words", ["compare done", "data list", "reproduce", "reproduce learn2pfed-table1 --plan", "list"]
)
def test_what_is_printed_fits_80_columns(words: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.commands.WIDTH", 80)
    done = equipoise_command(*words.split(), cwd=place)
    assert done.returncode == 0
    tables = [line for line in done.stdout.splitlines() if "  " in line]  # sentences are wrapped by the terminal
    assert tables
    assert all(len(line) <= 80 for line in tables)
