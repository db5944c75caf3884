"""Clients' data in files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from equipoise.data.client_files import TableFormat, read_clients
from equipoise.data.federation import from_clients
from equipoise.errors import EquipoiseError

X, Y = np.random.default_rng(0).normal(size=(8, 3)), np.arange(8) % 2


def test_one_file_or_one_folder_per_client(tmp_path: Path) -> None:
    np.savez(tmp_path / "anna.npz", x=X, y=Y)
    save_file({"train.x": torch.tensor(X), "train.y": torch.tensor(Y)}, tmp_path / "ben.safetensors")
    (tmp_path / "carl").mkdir()
    for split in ("train", "test"):
        np.savez(tmp_path / "carl" / f"{split}.npz", x=X, y=Y)
    (tmp_path / "notes.txt").write_text("not data")
    federation = from_clients(read_clients(tmp_path, TableFormat()))
    assert federation.names == ("anna", "ben", "carl")
    assert federation.train.lengths.tolist() == [5, 8, 8]
    assert federation.test.lengths.tolist() == [2, 0, 8]
    assert list(read_clients(tmp_path / "anna.npz", TableFormat())) == ["anna"]
    assert list(read_clients(tmp_path / "carl", TableFormat())) == ["carl"]  # the files of one client


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(EquipoiseError, match="there is no file or folder"):
        read_clients(tmp_path / "none", TableFormat())
    with pytest.raises(EquipoiseError, match="put one file per client there"):
        read_clients(tmp_path, TableFormat())
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    save_file({"x": torch.tensor(X), "y": torch.tensor(Y)}, tmp_path / "a.safetensors")
    with pytest.raises(EquipoiseError, match="have one name"):
        read_clients(tmp_path, TableFormat())
    (tmp_path / "a.safetensors").unlink()
    np.savez(tmp_path / "a.npz", x=X)
    with pytest.raises(EquipoiseError, match=r"a\.npz has only one of x and y"):
        read_clients(tmp_path, TableFormat())
