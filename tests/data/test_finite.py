"""NaN and infinity are found before anything is trained."""

from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equipoise as eq
from equipoise.data.federation import Federation
from equipoise.data.finite import check_finite
from tests.support.commands import equipoise_command, one_sentence, small

SPLITS = ("train", "validation", "test")


def clients(*shape: int) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    rng = np.random.default_rng(0)
    return {name: {s: (rng.normal(size=(6, *shape)), np.arange(6) % 3) for s in SPLITS} for name in "abc"}


@given(
    name=st.sampled_from("abc"),
    split=st.sampled_from(SPLITS),
    column=st.integers(0, 3),
    rows=st.sets(st.integers(0, 5), min_size=1),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_client_split_column_and_count_are_named(name: str, split: str, column: int, rows: set, value: float) -> None:
    data = clients(4)
    data[name][split][0][sorted(rows), column] = value
    with pytest.raises(eq.EquipoiseError) as error:
        eq.train(nn.Linear(4, 3), data, eq.FedAvg(), rounds=1)
    count = len(rows)
    assert str(error.value) == (
        f"client {name!r} has {count} NaN or infinite values in the inputs of {count} of its 6 {split} samples "
        f"(column {column}: {count}); remove or replace them before training"
    )


def test_places_in_images_targets_and_other_clients_are_told() -> None:
    data = clients(2, 3, 5)
    data["b"]["test"][0][1, 1, 2, 4] = np.nan
    data["c"]["train"][0][:, :, 0, 0] = np.inf
    federation = eq.from_clients(data)
    words = r"'b' has 1 .* 1 of its 6 test samples \(feature \[1, 2, 4\]: 1\); another client has some too; remove"
    with pytest.raises(eq.EquipoiseError, match=words):
        check_finite(federation)
    with pytest.raises(eq.EquipoiseError, match=words):
        check_finite(federation.prepared(torch.float32, channels_last=True))
    numbers = {name: (np.zeros((9, 2)), np.where(np.arange(9) > 6, np.nan, 1.0)) for name in "abcd"}
    with pytest.raises(eq.EquipoiseError, match=r"'a' has \d NaN .* in the targets of .*; 3 other clients do too"):
        check_finite(eq.from_clients(numbers))
    wide = eq.from_clients({"a": (np.full((5, 9), np.inf), np.zeros(5, dtype=int))}, split=(1, 0, 0))
    with pytest.raises(eq.EquipoiseError, match=r"column 0: 5, .*column 4: 5, and 4 more\)"):
        check_finite(wide)


def test_samples_that_nobody_owns_do_no_harm() -> None:
    federation = eq.from_clients(clients(4)).keeping(["a", "b"])
    federation.x[-1] = np.nan
    check_finite(federation)


def test_a_federation_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = eq.from_clients(clients(4))
    seen = []
    monkeypatch.setattr(torch, "aminmax", lambda t, real=torch.aminmax: seen.append(t.data_ptr()) or real(t))
    for _ in range(3):
        check_finite(federation)
    assert len(seen) == 1  # labels are whole numbers


def test_the_command_line_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small()))
    called = Federation.called

    def spoilt(self: Federation, *words: object) -> Federation:
        self.x[self.train[1][0], 0] = float("nan")
        return called(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(Federation, "called", spoilt)
    done = equipoise_command("run", "small.toml", cwd=tmp_path)
    one_sentence(done, 2, "has 1 NaN or infinite values in the inputs of 1 of its", "(column 0: 1)")
    assert not (tmp_path / "runs").exists()
