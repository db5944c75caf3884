"""The catalogue that `equipoise list` reads is the registries."""

import json
from pathlib import Path

import pytest

from equipoise.errors import EquipoiseError
from equipoise.runs import listing


def test_the_catalogue_is_current() -> None:
    found = json.loads(listing.CATALOGUE.read_text())
    expected = json.loads(json.dumps({"sources": listing.source_digest(), **listing.from_registries()}))
    assert found == expected, "run `make catalogue`"


def test_a_catalogue_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = listing.listing("reducers")
    wrong = {"sources": "of another version", "reducers": [{"name": "nothing"}]}
    (tmp_path / "catalogue.json").write_text(json.dumps(wrong))
    monkeypatch.setattr(listing, "CATALOGUE", tmp_path / "catalogue.json")
    assert json.loads(json.dumps(listing.listing("reducers"))) == true
    (tmp_path / "catalogue.json").write_text("{damaged")
    assert json.loads(json.dumps(listing.listing("reducers"))) == true
    (tmp_path / "catalogue.json").unlink()
    assert json.loads(json.dumps(listing.listing("reducers"))) == true


def test_a_catalogue_that_is_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "CATALOGUE", tmp_path / "catalogue.json")
    listing.write_catalogue()
    monkeypatch.setattr(listing, "from_registries", lambda: pytest.fail("the registries were read"))
    assert next(entry["name"] for entry in listing.listing("attacks")) == "none"
    with pytest.raises(EquipoiseError, match="there is no 'fedavgg' among the algorithms; did you mean 'fedavg'"):
        listing.listing("algorithms", "fedavgg")
