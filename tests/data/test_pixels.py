"""Pixels as bytes: the same values, bit for bit, in a quarter of the memory."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise.algorithms import Ditto, FedAvg
from equipoise.data import federation as federation_module
from equipoise.data.federation import BatchBuffer, Federation, from_clients
from equipoise.data.pixels import from_bytes, to_bytes
from equipoise.data.pool import as_images
from equipoise.engine.origin import describe_origin, find_data_difference
from equipoise.models import MODELS
from tests.support.problems import simulation

SHAPES: Any = st.sampled_from([(256,), (1, 16, 16), (3, 10, 12)])


def images(shape: tuple[int, ...] = (1, 16, 16), clients: int = 4, seed: int = 0) -> Federation:
    rng = np.random.default_rng(seed)
    parts = []
    for n in range(20, 20 + clients):
        raw = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        parts.append(((raw.astype(np.float32) / np.float32(255)), rng.integers(0, 3, n)))
    return from_clients(parts)


def as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep inputs as they are, as version 0.1 did."""
    monkeypatch.setattr(federation_module, "to_bytes", lambda x: None)


@given(SHAPES, st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_a_gather_of_bytes_has_the_bits_of_a_gather_of_numbers(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype, channels_last: bool
) -> None:
    plain = images(shape, 2, seed)
    x = plain.x.to(dtype)
    packed = plain.prepared(dtype, channels_last)
    assert (packed.x.dtype, packed.pixels) == (torch.uint8, dtype)
    rows = torch.from_numpy(np.random.default_rng(seed).integers(0, len(x), 9))
    memory = BatchBuffer()
    for indices in (rows, rows[:4], rows[:0]):
        for given_memory in (None, memory):
            found, y = packed.gather(indices, given_memory)
            assert found.dtype == dtype
            assert torch.equal(found, x[indices])
            assert torch.equal(y, plain.y[indices])
    assert torch.equal(packed.gather(rows)[0].float().view(torch.int32), x[rows].float().view(torch.int32))


def test_every_byte_is_as_images_has_it() -> None:
    raw = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    found = to_bytes(as_images(raw))
    assert found is not None
    assert found.numpy().tobytes() == raw.tobytes()
    assert torch.equal(from_bytes(found, torch.float32), as_images(raw))


@pytest.mark.parametrize("value", [-0.0, float("nan"), 0.2000001, 256 / 255, -1 / 255])
def test_what_is_not_a_byte_stays_as_it_is(value: float) -> None:
    x = images().x
    assert to_bytes(x) is not None
    x[-1, 0, 0, 0] = value
    assert to_bytes(x) is None


def test_symbols_and_small_samples_stay_as_they_are() -> None:
    assert to_bytes(torch.zeros(3, 300, dtype=torch.uint8)) is None
    assert to_bytes(torch.zeros(3, 20)) is None
    assert to_bytes(torch.zeros(0, 300)) is None
    symbols = from_clients([(np.zeros((9, 300), np.uint8), np.arange(9) % 2)])
    assert symbols.prepared(torch.float32, False).pixels is None


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digests_do_not_change(dtype: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = images((3, 10, 12))
    packed = plain.prepared(dtype, channels_last)
    run = simulation(FedAvg(), plain, MODELS["softmax"]().build((3, 10, 12), 3), head=None)
    task = run.task
    run.close()
    origin = describe_origin(packed, task)
    chunked = packed.fingerprint(splits=True), packed.problem()
    monkeypatch.setattr(federation_module, "_CHUNK", 7)
    assert (packed.fingerprint(splits=True), packed.problem()) == chunked
    as_floats(monkeypatch)
    before = plain.prepared(dtype, channels_last)
    assert before.pixels is None
    assert before.x.dtype == dtype
    assert (before.fingerprint(splits=True), before.problem()) == chunked
    assert describe_origin(before, task) == origin
    assert find_data_difference(origin, packed) is None
    assert plain.packed().problem() == plain.problem()
    assert plain.packed().fingerprint() == plain.fingerprint()
    assert torch.equal(packed.unpacked.x, before.x)
    assert repr(packed) == repr(before)


@pytest.mark.parametrize("mode", ["threads", "stacked"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_runs_on_bytes_are_runs_on_numbers(mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def finished() -> Any:
        torch.manual_seed(0)
        model = MODELS["softmax"]().build((1, 16, 16), 3)
        run = simulation(Ditto(lr=0.1, batch=6), images(), model, mode=mode, dtype=dtype, head=None, rounds=3)
        run.run()
        return run

    packed = finished()
    as_floats(monkeypatch)
    plain = finished()
    assert packed.federation.x.dtype == torch.uint8
    assert plain.federation.x.is_floating_point()
    assert packed.lines == plain.lines
    assert torch.equal(packed.server.w, plain.server.w)
    for kind, table in packed.scores.training.tables.items():
        assert table.scores.tobytes() == plain.scores.training.tables[kind].scores.tobytes()


def test_a_result_shows_the_inputs_themselves() -> None:
    plain = images()
    model = MODELS["softmax"]().build((1, 16, 16), 3)
    result = eq.train(model, plain, eq.Local(), head=None, rounds=1)
    assert torch.equal(result.federation.x, plain.x)
    assert result.personal(plain.names[0])(result.federation.x[:2]).shape == (2, 3)


def test_bytes_take_a_quarter_of_the_memory_and_are_found_once() -> None:
    plain = images()
    packed = plain.packed()
    assert packed.packed() is packed
    assert 4 * packed.x.numel() * packed.x.element_size() == plain.x.numel() * plain.x.element_size()
    assert packed.prepared(torch.float32, False).x.data_ptr() == packed.x.data_ptr()
