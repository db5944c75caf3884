"""Tensors in files."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from equipoise.errors import EquipoiseError
from equipoise.storage.tensor_files import DTYPES, write_rows, write_tensors


@given(
    rows=st.integers(0, 5),
    width=st.integers(0, 4),
    dtype=st.sampled_from(sorted(DTYPES)),
    order=st.randoms(use_true_random=False),
)
def test_a_table_that_comes_row_by_row_is_read_as_one_tensor(
    rows: int, width: int, dtype: str, order, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / "file.safetensors"
    table = torch.arange(rows * width).reshape(rows, width).to(DTYPES[dtype])
    whole = {"small": torch.tensor([1.5, 2.5]), "turned": torch.arange(6.0).reshape(2, 3).T, "empty": torch.empty(0)}
    numbered = [("table", i, row) for i, row in enumerate(table)]
    order.shuffle(numbered)
    write_rows(path, whole, {"table": ((rows, width), table.dtype)}, iter(numbered), {"a": "b"})
    found = load_file(path)
    assert found.keys() == {*whole, "table"}
    assert all(torch.equal(found[name], tensor) for name, tensor in {**whole, "table": table}.items())


def test_what_fails_on_the_way_leaves_no_file(tmp_path: Path) -> None:
    def rows():
        yield "table", 0, torch.zeros(2)
        raise EquipoiseError("no more")

    with pytest.raises(EquipoiseError, match="no more"):
        write_rows(tmp_path / "file", {}, {"table": ((2, 2), torch.float32)}, rows())
    assert not list(tmp_path.iterdir())


METADATA = {f"key {k}": f'välue {k} "quoted"\n' for k in (3, 1, 2, 5, 4)}


def test_files_with_the_same_metadata_have_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(3.0), "b": torch.ones(2, 2)}
    for k in range(8):
        write_tensors(tmp_path / f"{k}.safetensors", tensors, METADATA)
    assert len({(tmp_path / f"{k}.safetensors").read_bytes() for k in range(8)}) == 1
    with safe_open(tmp_path / "0.safetensors", framework="pt") as file:
        assert file.metadata() == METADATA
        assert torch.equal(file.get_tensor("w"), tensors["w"])
        assert torch.equal(file.get_tensor("b"), tensors["b"])
