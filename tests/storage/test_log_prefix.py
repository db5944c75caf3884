"""The digest of a log's beginning grows with the log, and tells what was changed."""

from hashlib import blake2b
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from equipoise.storage.log_prefix import LogPrefix, find_change


def digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    prefix = LogPrefix(log)
    assert prefix.read_on() == digest(b"")
    log.write_bytes(b"one\n")
    assert prefix.read_on() == digest(b"one\n")
    log.write_bytes(b"ONE\ntwo\n")  # the beginning is not read again, or its change would show
    assert prefix.read_on() == digest(b"one\ntwo\n")
    assert prefix.length == 8
    log.write_bytes(b"ONE\n")
    assert prefix.read_on() == digest(b"ONE\n")


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 2**32), st.integers(1, 255))
def test_any_change_of_the_beginning_is_found(
    tmp_path_factory, before: bytes, after: bytes, where: int, change: int
) -> None:
    log = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    log.write_bytes(before + after)
    assert find_change(log, len(before), digest(before)) is None
    assert find_change(log, len(before), None) is None
    if before:
        changed = bytearray(before + after)
        changed[where % len(before)] ^= change
        log.write_bytes(changed)
        assert find_change(log, len(before), digest(before)) == (
            "metrics.jsonl has other content than at that checkpoint"
        )
        log.write_bytes(before[:-1])
        assert find_change(log, len(before), None) == "metrics.jsonl is shorter than at that checkpoint"
        log.unlink()
        assert find_change(log, len(before), None) == "metrics.jsonl is missing"
