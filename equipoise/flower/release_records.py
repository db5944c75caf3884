"""The records of what a client has released: the content of the ledger's file, and what state files say about it."""

import json
import math
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from equipoise.errors import EquipoiseError
from equipoise.flower.client_state import EVIDENCE
from equipoise.flower.release_plan import ReleasePlan
from equipoise.privacy.accounting import ReleaseCount
from equipoise.state import State

_BYTES = 32  # length of the secret and of digests
_LONGEST_HEADER = 100 << 20


@dataclass
class ReleaseRecords:
    """The content of the file: a secret, and the messages that were released."""

    secret: str = field(default_factory=lambda: secrets.token_hex(_BYTES))
    experiments: dict[str, dict[str, float]] = field(default_factory=dict)
    """planned number of messages, noise multiplier and delta of each experiment, and whether it hides single samples
    only; the first one began the folder"""
    sent: list[tuple[int, str]] = field(default_factory=list)
    "experiment's number and digest of the question, for every question that was answered, in order"
    answers: dict[str, str] = field(default_factory=dict)
    "digest of the answer to each question, by the digest of experiment and question"
    runs: list[str] = field(default_factory=list)
    "runs that messages were released in"
    earlier: dict[str, int] = field(default_factory=dict)
    "number of messages that version 0.1 released, by run"

    @property
    def count(self) -> int:
        return len(self.sent) + sum(self.earlier.values())

    def chain(self) -> list[str]:
        """Return digests of the secret and of the first 0, 1, 2, ... messages."""
        link = as_digest(bytes.fromhex(self.secret))
        found = [link]
        for number, digest in self.sent:
            link = as_digest(bytes.fromhex(link) + number.to_bytes(8, "little") + bytes.fromhex(digest))
            found.append(link)
        return found

    def evidence(self) -> str:
        """Return what state files record of these records."""
        return json.dumps([len(self.sent), self.chain()[-1]])

    def epsilon(self, plan: ReleasePlan) -> float:
        """Return the epsilon of all messages and one more of a plan, with the smallest delta of any experiment."""
        known = list(self.experiments.values())
        deltas, multipliers = [plan.delta, *(one["delta"] for one in known)], [one["z"] for one in known]
        noise = [multipliers[number] for number, _ in self.sent] + [plan.z]
        if min(noise) <= 0:
            return math.inf
        # Gaussian releases with noise multipliers z_i reveal as much as one with 1 / sqrt(sum 1 / z_i^2).
        together = 1 / math.sqrt(math.fsum(1 / z**2 for z in noise))
        return ReleaseCount(1).epsilon(together, min(deltas))

    @staticmethod
    def parse(facts: Any) -> "ReleaseRecords":
        """Check the content of the file; raise ValueError with what is wrong."""
        if not isinstance(facts, dict) or facts.get("version") != 2:
            raise ValueError("it is not a list of releases of this version")
        content = ReleaseRecords(_hex(facts.get("secret"), "secret"))
        experiments = _typed(facts.get("experiments"), dict, "experiments")
        for digest, one in experiments.items():
            numbers = [_typed(one, dict, "experiments").get(key) for key in ("planned", "z", "delta")]
            if not all(type(n) in (int, float) and math.isfinite(n) and n >= 0 for n in numbers):
                raise ValueError("an experiment is incomplete")
            known = dict(zip(("planned", "z", "delta"), numbers, strict=True))
            content.experiments[_hex(digest, "digest")] = known | ({"samples": 1} if one.get("samples") else {})
        for entry in _typed(facts.get("sent"), list, "sent"):
            number, digest = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
            if type(number) is not int or not 0 <= number < len(experiments):
                raise ValueError("a message belongs to no experiment")
            content.sent.append((number, _hex(digest, "digest")))
        for question, answer in _typed(facts.get("answers"), dict, "answers").items():
            content.answers[_hex(question, "digest")] = _hex(answer, "digest")
        content.runs = [_typed(run, str, "runs") for run in _typed(facts.get("runs"), list, "runs")]
        for run, count in _typed(facts.get("earlier"), dict, "earlier").items():
            if type(count) is not int or count < 0:
                raise ValueError("'earlier' is incomplete")
            content.earlier[run] = count
        return content

    def table(self) -> dict[str, Any]:
        """Return the content as JSON."""
        return {
            "version": 2,
            "secret": self.secret,
            "experiments": self.experiments,
            "sent": self.sent,
            "answers": self.answers,
            "runs": self.runs,
            "earlier": self.earlier,
        }


def recorded_evidence(file: Path) -> tuple[int, str] | None:
    """Return what a state file records of the ledger; None if it was written without privacy."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError("its header is too long")
            metadata: Mapping[str, str] = json.loads(opened.read(length)).get("__metadata__", {})
        if EVIDENCE not in metadata:
            return None
        count, chain = json.loads(metadata[EVIDENCE])
        return int(count), str(chain)
    except (OSError, ValueError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise EquipoiseError(f"the client's state in {file} cannot be read: {error}") from None


def count_of_earlier_version(text: str) -> int:
    """Return the number of messages in a run's list of releases by version 0.1; raise ValueError if it is wrong."""
    return len(_typed(_typed(json.loads(text), dict, "content").get("sent"), list, "sent"))


def message_digest(message: State) -> str:
    """Return the digest of a message."""
    parts = (
        f"{name} {tuple(t.shape)} {t.dtype} ".encode() + t.contiguous().numpy().tobytes() for name, t in message.items()
    )
    return as_digest(b"".join(parts))


def as_digest(data: bytes) -> str:
    """Return the digest of bytes."""
    return blake2b(data, digest_size=_BYTES).hexdigest()


def _hex(text: Any, what: str) -> str:
    """Return a text that has the digits of so many bytes as a secret or a digest has; otherwise raise ValueError."""
    if not isinstance(text, str) or len(text) != 2 * _BYTES or set(text) - set("0123456789abcdef"):
        raise ValueError(f"its {what} is not {2 * _BYTES} hexadecimal digits")
    return text


def _typed(value: Any, cls: type, what: str) -> Any:
    if not isinstance(value, cls):
        raise ValueError(f"{what!r} is missing or wrong")
    return value
