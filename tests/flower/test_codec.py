"""What comes over the wire: exactly what was sent, or refused; never a surprise."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.flower import codec
from equipoise.flower.codec import RejectedMessage, group, named, pack, unpack
from equipoise.state import State
from tests.support.messages import ALLOWED, NUMBERS, Burglar, bits, examples, json_values, tensors_of

VERDICTS = {"taken", "oversize", "shape", "malformed"}


GOOD = pack(tensors_of(bytes(range(NUMBERS))), {"round": 3, "words": ["a", None, 0.5]})


def message(header: Any, data: bytes = b"") -> bytes:
    """Bytes with this header, whatever it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: Any, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


META = {"__metadata__": {"equipoise": "{}"}}
W = entry("F32", [3], 0, 12)


def verdict(blob: bytes) -> str:
    """The reason for which it is refused, or "taken" if it is nothing but what is allowed; any other error fails."""
    try:
        tensors, facts = unpack(blob, ALLOWED)
    except RejectedMessage as refused:
        return refused.reason
    assert type(tensors) is State
    assert type(facts) is dict
    for name, found in tensors.shapes().items():
        assert found == ALLOWED[name]
    return "taken"


@given(
    numbers=st.binary(min_size=NUMBERS, max_size=NUMBERS),
    names=st.sets(st.sampled_from(list(ALLOWED))),
    facts=st.dictionaries(st.text(max_size=4), json_values, max_size=3),
)
@examples
def test_tensors_and_facts_come_out_as_they_went_in(numbers: bytes, names: set[str], facts: dict[str, Any]) -> None:
    sent = {name: t for name, t in tensors_of(numbers).items() if name in names}
    tensors, heard = unpack(pack(sent, facts), ALLOWED)
    assert bits(tensors) == bits(sent)
    assert json.dumps(heard) == json.dumps(facts)


def test_views_of_one_memory_are_sent_as_they_are_seen() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    sent = {"a": whole.T, "b": whole[:, 1], "c": whole, "d": whole, "e": whole[1:]}
    allowed = {name: (tuple(t.shape), t.dtype) for name, t in sent.items()}
    tensors, facts = unpack(pack(sent, {}), allowed)
    assert facts == {}
    for name, t in sent.items():
        assert torch.equal(tensors[name], t)
    tensors["a"].zero_()
    assert torch.equal(tensors["c"], whole)
    assert whole[2, 3] == 11


@given(
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
)
@examples
def test_groups_of_names_come_apart_again(one: dict[str, int], other: dict[str, int]) -> None:
    both: Any = {**named(one, "one"), **named(other, "oneself")}
    assert group(both, "one") == one
    assert group(both, "oneself") == other
    assert group(both, "on") == {}


@given(blob=st.binary(max_size=200) | st.binary(max_size=200).map(message))
@examples
def test_arbitrary_bytes_are_refused(blob: bytes) -> None:
    assert verdict(blob) == "malformed"


def test_every_beginning_of_a_message_is_refused() -> None:
    assert verdict(GOOD) == "taken"
    for length in range(len(GOOD)):
        assert verdict(GOOD[:length]) == "malformed", length


@given(more=st.binary(min_size=1, max_size=64))
@examples
def test_a_message_with_something_behind_it_is_refused(more: bytes) -> None:
    assert verdict(GOOD + more) == "malformed"


def test_a_flipped_bit_is_refused_or_changes_only_what_was_said() -> None:
    """Each bit in turn: in the tensors it gives other numbers, anywhere else it shows or is harmless."""
    (header,) = struct.unpack("<Q", GOOD[:8])
    for bit in range(8 * len(GOOD)):
        blob = bytearray(GOOD)
        blob[bit // 8] ^= 1 << bit % 8
        found = verdict(bytes(blob))
        if bit // 8 < 8:  # the header's length
            assert found == "malformed", bit
        elif bit // 8 < 8 + header:
            assert found in VERDICTS
        else:
            assert found == "taken", bit


@given(data=st.data())
@settings(max_examples=200, derandomize=True)
def test_a_spoilt_message_is_refused_or_allowed(data: st.DataObject) -> None:
    blob = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(blob) - 1))
        kind = data.draw(st.sampled_from(["flip", "sign", "insert", "drop"]))
        if kind == "flip":
            blob[at] ^= data.draw(st.integers(1, 255))
        elif kind == "sign":  # what is still JSON gets further
            blob[at] = data.draw(st.sampled_from(b'0123456789"{}[],:\\-.eE FIBU_'))
        elif kind == "insert":
            blob[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif len(blob) > 1:
            del blob[at]
    assert verdict(bytes(blob)) in VERDICTS


small = st.integers(-1, 5)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F64", "I64", "F16", "BOOL", "F8_E4M3", "f32", "", None, ["F32"], 32]),
        "shape": st.sampled_from([[3], [2, 2], [1], [0], [True], [3.0]]) | st.lists(small, max_size=3) | json_values,
        "data_offsets": st.sampled_from([[0, 12], [0, 32], [0, 8], [0, 0], [12, 44]])
        | st.lists(st.integers(-1, 60) | st.sampled_from([2**62, 2**64]), max_size=3)
        | json_values,
        "more": json_values,
    },
)
headers = st.dictionaries(
    st.sampled_from([*ALLOWED, "up.x", "", "__metadata__"]) | st.text(max_size=4), entries | json_values, max_size=4
)
metadata = st.sampled_from(["{}", '{"round": 1}', "[]", "3", "null", "{", "NaN", ""]).map(lambda t: {"equipoise": t})


@given(header=headers, meta=metadata | st.none() | json_values, data=st.binary(max_size=60))
@settings(max_examples=200, derandomize=True)
def test_any_header_is_refused_or_allowed(header: dict[str, Any], meta: Any, data: bytes) -> None:
    assert verdict(message({**header, **({} if meta is None else {"__metadata__": meta})}, data)) in VERDICTS


WRONG = {
    "another shape": ({"up.w": torch.zeros(4)}, "up.w is float32 of shape (4,), but float32"),
    "one axis more": ({"up.w": torch.zeros(3, 1)}, "of shape (3, 1)"),
    "axes the other way": ({"up.m": torch.zeros(4, 1, dtype=torch.float64)}, "but float64 of shape (2, 2) is expected"),
    "less precise": ({"up.m": torch.zeros(2, 2)}, "up.m is float32"),
    "of the same size": ({"up.n": torch.zeros(1, dtype=torch.float64)}, "up.n is float64 of shape (1,)"),
    "not empty": ({"up.none": torch.zeros(1)}, "but float32 of shape (0,) is expected"),
    "one too many": (
        {"up.w": torch.zeros(3), "up.extra": torch.zeros(1)},
        "contains 'up.extra', which is not expected",
    ),
    "without its prefix": ({"w": torch.zeros(3)}, "contains 'w'"),
    "an unknown kind": ({"up.w": torch.zeros(3, dtype=torch.complex64)}, "up.w is None of shape (3,)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_was_not_announced_is_refused_before_a_tensor_is_made(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, words = WRONG[case]
    blob = pack(tensors, {})

    def never(blob: bytes) -> None:
        raise AssertionError("a tensor was made")

    monkeypatch.setattr(codec, "load", never)
    with pytest.raises(RejectedMessage) as refused:
        unpack(blob, ALLOWED)
    assert refused.value.reason == "shape"
    assert words in str(refused.value)


MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "no header": struct.pack("<Q", 0),
    "a huge header": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a header beyond the end": struct.pack("<Q", 3) + b"{}",
    "a list": message([]),
    "a word": message("word"),
    "deep lists": message(b"[" * 60_000),
    "deep tables": message(b'{"a":' * 10_000),
    "deep facts": message({"__metadata__": {"equipoise": "[" * 30_000}}),
    "a long number": message(b'{"up.w": ' + b"9" * 5_000 + b"}"),
    "not UTF-8": message(b'{"\xff": 1}'),
    "UTF-16": message(json.dumps({**META, "up.w": W}).encode("utf-16"), bytes(12)),
    "no metadata": message({"up.w": W}, bytes(12)),
    "metadata of others": message({"__metadata__": {"format": "pt"}}),
    "metadata that are a list": message({"__metadata__": ["equipoise"]}),
    "metadata that are null": message({"__metadata__": None}),
    "facts that are no text": message({"__metadata__": {"equipoise": 3}}),
    "facts that are no JSON": message({"__metadata__": {"equipoise": "{"}}),
    "facts that are a list": message({"__metadata__": {"equipoise": "[]"}}),
    "facts that are a number": message({"__metadata__": {"equipoise": "3"}}),
    "facts twice": message(b'{"__metadata__":{"equipoise":"{}"},"__metadata__":{"equipoise":"{}"}}'),
    "no shape": message({**META, "up.w": {"dtype": "F32", "data_offsets": [0, 12]}}, bytes(12)),
    "a number for a tensor": message({**META, "up.w": 3}),
    "true for one": message({**META, "up.n": entry("I64", [True], 0, 8)}, bytes(8)),
    "a fraction for one": message({**META, "up.n": entry("I64", [1.0], 0, 8)}, bytes(8)),
    "too few bytes": message({**META, "up.w": W}, bytes(11)),
    "too many bytes": message({**META, "up.w": W}, bytes(13)),
    "bytes of no tensor": message(META, bytes(4)),
    "overlapping tensors": message({**META, "up.w": W, "up.n": entry("I64", [1], 4, 12)}, bytes(12)),
    "one tensor twice in memory": message({**META, "up.w": W, "up.n": entry("I64", [1], 0, 8)}, bytes(12)),
    "a hole between": message({**META, "up.w": W, "up.n": entry("I64", [1], 16, 24)}, bytes(24)),
    "a negative place": message({**META, "up.w": entry("F32", [3], -12, 0)}, bytes(12)),
    "a place beyond all": message({**META, "up.w": entry("F32", [3], 0, 2**70)}, bytes(12)),
    "the end before the begin": message({**META, "up.w": entry("F32", [3], 12, 0)}, bytes(12)),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_safetensors_does_not_write_is_malformed(case: str) -> None:
    assert verdict(MALFORMED[case]) == "malformed"


def test_the_helpers_make_good_messages_too() -> None:
    """So that the refusals above are for what is wrong."""
    assert verdict(message(META)) == "taken"
    assert verdict(message({**META, "up.w": W, "up.n": entry("I64", [1], 12, 20)}, bytes(20))) == "taken"


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    stolen = pickle.dumps(Burglar(trace))
    pickle.loads(stolen)
    assert trace.exists(), "it is a working burglar"
    trace.unlink()
    torch.save({"up.w": Burglar(trace)}, tmp_path / "pickled.pt")
    facts = {"__metadata__": {"equipoise": stolen.decode("latin-1")}}
    for blob in (stolen, message(stolen), message(META, stolen), (tmp_path / "pickled.pt").read_bytes()):
        assert verdict(blob) in ("malformed", "oversize")
    assert verdict(message(facts)) == "malformed"
    assert not trace.exists()


def test_the_largest_message_and_one_byte_more() -> None:
    """As much room as the announced tensors and a header need, and no more."""
    whole = {**META, "up.w": W, "up.m": entry("F64", [2, 2], 12, 44), "up.n": entry("I64", [1], 44, 52)}
    room = 1 << 16
    largest = message(json.dumps(whole).encode().ljust(room), bytes(NUMBERS))
    assert len(largest) == 8 + room + NUMBERS
    assert verdict(largest) == "taken"
    assert verdict(largest + b"\0") == "oversize"
    assert verdict(message(json.dumps(META).encode().ljust(room + 1))) == "malformed"
    with pytest.raises(RejectedMessage) as refused:
        unpack(bytes(10**6), ALLOWED)
    assert refused.value.reason == "oversize"
    assert str(refused.value) == f"1000000 bytes, but at most {len(largest)} are expected"
