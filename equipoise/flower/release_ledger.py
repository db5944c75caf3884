"""What a client has released in a run, so that a server cannot make it release more than was planned."""

import json
import secrets
from hashlib import blake2b
from pathlib import Path

from equipoise.errors import EquipoiseError
from equipoise.flower.codec import RejectedMessage
from equipoise.privacy.mechanisms import Noise, secure_noise
from equipoise.state import State
from equipoise.storage import atomic_files


class ReleaseLedger:
    """A file with the messages that a client has released, and with the secret from which their noise is drawn.

    A message that is requested again gets the same noise, which reveals nothing new and does not count again. With
    fresh noise for every request, a server could average the noise away.
    """

    def __init__(self, path: Path, most: int):
        """Read the ledger, or begin one; `most` is the number of messages that may be released in the run."""
        self.path, self.most = path, most
        self.secret, self.sent = secrets.token_hex(32), list[str]()
        if path.exists():
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
                self.secret, self.sent = facts["secret"], list(facts["sent"])
                bytes.fromhex(self.secret)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise EquipoiseError(f"the list of releases in {path} cannot be read: {error}") from None

    def noise(self, message: State) -> Noise:
        """Return the noise for a message, and record the message; reject it if the limit is reached."""
        hasher = blake2b(digest_size=16)
        for name, t in message.items():
            hasher.update(f"{name} {tuple(t.shape)} ".encode() + t.contiguous().numpy().tobytes())
        digest = hasher.hexdigest()
        if digest not in self.sent:
            if len(self.sent) >= self.most:
                raise RejectedMessage(
                    "failed",
                    f"{self.most} messages were released already, which is the number that privacy was calculated for",
                )
            self.sent.append(digest)
            with atomic_files.atomic_write(self.path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(json.dumps({"secret": self.secret, "sent": self.sent}), encoding="utf-8")
        return secure_noise(bytes.fromhex(self.secret) + bytes.fromhex(digest))
