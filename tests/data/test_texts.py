"""Texts by role, whole or in LEAF's windows: the next character is the target, and time goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.data import text_encoding
from equipoise.errors import EquipoiseError
from tests.support import datafiles
from tests.support.datafiles import load


def test_leafs_folders_hold_the_same_samples_and_are_read_once_in_the_order_of_time(tmp_path: Path) -> None:
    words = text_encoding.ALPHABET[1:] * 4
    x, y = datafiles.leaf_windows(words)
    folder = tmp_path / "shakespeare" / "data"
    for place, rows in (("all_data", range(len(x))), ("test", range(200, len(x))), ("train", range(200))):
        (folder / place).mkdir(parents=True)
        users = {"u": ([x[k] for k in rows], [y[k] for k in rows])}
        (folder / place / "a.json").write_text(json.dumps(datafiles.leaf(users)))
    pool = load("shakespeare", tmp_path, stride=1, predict="last", split=(1.0, 0.0, 0.0))
    assert [text_encoding.decode(row.numpy()) for row in pool.x] == x


def test_shakespeare_targets_are_the_next_characters(tmp_path: Path) -> None:
    texts = datafiles.roles(tmp_path / "shakespeare-roles.json.xz")
    pool = load("shakespeare", tmp_path)
    assert pool.owners is not None
    assert pool.part is not None
    assert pool.x.shape == pool.y.shape == (len(pool), 80)
    for row in range(len(pool)):
        words = texts[str(pool.owners[row])]
        window = text_encoding.decode(pool.x[row].numpy())
        assert window in words
        assert window[1:] == text_encoding.decode(pool.y[row, :-1].numpy())
        assert window + text_encoding.decode(pool.y[row, -1:].numpy()) in words
    assert set(pool.part.tolist()) == {0, 1, 2}
    last = load("shakespeare", tmp_path, predict="last", stride=1)
    assert last.y.ndim == 1
    assert len(last) > 60 * len(pool)


@pytest.mark.parametrize("settings", [{"stride": 5}, {"stride": 1}, {"stride": 7}, {"stride": 1, "predict": "last"}])
def test_no_character_that_is_tested_was_trained_on(settings: dict, tmp_path: Path) -> None:
    """Each character of the text is its own: with distinct ones, what is asked for in one part is in no other."""
    alphabet = text_encoding.ALPHABET[1:]
    assert len(set(alphabet)) == 95
    (tmp_path / "shakespeare-roles.json").write_text(json.dumps({"role": alphabet}))
    pool = load("shakespeare", tmp_path, window=5, **settings)
    assert pool.part is not None
    asked = [set(pool.y[torch.from_numpy(pool.part == k)].flatten().tolist()) for k in range(3)]
    assert all(asked)
    assert not asked[0] & asked[1]
    assert not asked[0] & asked[2]
    assert not asked[1] & asked[2]
    assert max(asked[0]) < min(asked[1])
    assert max(asked[1]) < min(asked[2])


def test_leafs_windows_are_the_same_text(tmp_path: Path) -> None:
    texts = datafiles.roles(tmp_path / "shakespeare-roles.json.xz")
    (tmp_path / "leaf" / "shakespeare").mkdir(parents=True)
    users = {name: datafiles.leaf_windows(words) for name, words in texts.items()}
    (tmp_path / "leaf" / "shakespeare" / "all_data.json").write_text(json.dumps(datafiles.leaf(users)))
    for settings in ({}, {"stride": 1, "predict": "last"}):
        ours, leafs = load("shakespeare", tmp_path, **settings), load("shakespeare", tmp_path / "leaf", **settings)
        assert torch.equal(ours.x, leafs.x)
        assert torch.equal(ours.y, leafs.y)
        assert np.array_equal(ours.part, leafs.part)  # type: ignore[arg-type]
    count = sum(len(words) - 80 for words in texts.values())
    assert leafs.portion == f"{count:,} of 4,226,158 samples"
    assert ours.portion == "own edition"


def test_windows_do_not_reach_over_gaps_in_leafs_samples(tmp_path: Path) -> None:
    x, y = datafiles.leaf_windows(text_encoding.ALPHABET[1:] * 3)
    keep = [*range(20), *range(100, 130)]
    (tmp_path / "shakespeare").mkdir()
    users = {"u": ([x[k] for k in keep], [y[k] for k in keep])}
    (tmp_path / "shakespeare" / "a.json").write_text(json.dumps(datafiles.leaf(users)))
    pool = load("shakespeare", tmp_path, stride=1, predict="last", split=(1.0, 0.0, 0.0))
    assert [text_encoding.decode(row.numpy()) for row in pool.x] == users["u"][0]
    assert [text_encoding.decode(row[None].numpy()) for row in pool.y] == users["u"][1]


@pytest.mark.parametrize("kept", [range(0, 350, 1), [k for k in range(350) if k % 90], [*range(200, 350), *range(200)]])
@pytest.mark.parametrize("predict", ["every", "last"])
def test_nothing_is_asked_for_twice_however_leafs_windows_come(kept: list, predict: str, tmp_path: Path) -> None:
    """A text of characters that can be told apart (by their place in a pair): targets of one part are in no other."""
    words = "".join(chr(33 + k // 90) + chr(33 + k % 90) for k in range(215))
    x, y = datafiles.leaf_windows(words)
    (tmp_path / "shakespeare").mkdir()
    users = {"u": ([x[k] for k in kept], [y[k] for k in kept])}
    (tmp_path / "shakespeare" / "a.json").write_text(json.dumps(datafiles.leaf(users)))
    pool = load("shakespeare", tmp_path, stride=1, predict=predict)
    assert pool.part is not None
    asked: list[set[int]] = [set(), set(), set()]
    for row, target, part in zip(pool.x, pool.y.reshape(len(pool), -1), pool.part, strict=True):
        place = words.index(text_encoding.decode(row.numpy()))
        first = place + 80 - target.numel() + 1
        assert words[first : first + target.numel()] == text_encoding.decode(target.numpy())
        asked[part] |= set(range(first, first + target.numel()))
    assert asked[0]
    assert asked[2]
    assert not asked[0] & asked[1]
    assert not asked[0] & asked[2]
    assert not asked[1] & asked[2]


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shakespeare-roles.json").write_text('{"a": "one", "a": "two"}')
    with pytest.raises(EquipoiseError, match="the key 'a' appears twice"):
        load("shakespeare", tmp_path)


def test_roles_too_short_are_left_out_and_said(tmp_path: Path) -> None:
    datafiles.roles(tmp_path / "shakespeare-roles.json.xz", lengths=(900, 60, 80))
    pool = load("shakespeare", tmp_path)
    assert len(set(pool.owners)) == 1  # type: ignore[arg-type]
    assert "2 roles are left out" in pool.notes[0]
    datafiles.roles(tmp_path / "shakespeare-roles.json.xz", lengths=(30,))
    with pytest.raises(EquipoiseError, match="no role is long enough"):
        load("shakespeare", tmp_path)


def test_unknown_characters_have_a_number_of_their_own() -> None:
    assert text_encoding.encode("a\n~é\N{GRINNING FACE}\x07").tolist() == [
        66 + 1,
        1,
        text_encoding.SYMBOLS - 1,
        0,
        0,
        0,
    ]
    assert text_encoding.decode(text_encoding.encode(text_encoding.ALPHABET)) == text_encoding.ALPHABET
