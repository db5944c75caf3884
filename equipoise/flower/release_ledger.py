"""What a client has let out in a run: a real client need not trust the server to ask for no more than was agreed."""

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
    """A secret, from which the noise of a client's messages comes, and which messages it has sent.

    The same message, asked for again, gets the same noise: that tells nothing new, and does not count. Who could have
    fresh noise on it as often as he asks could average it away.
    """

    def __init__(self, path: Path, most: int):
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
        """For this message; refused where it would be one more than may leave."""
        hasher = blake2b(digest_size=16)
        for name, t in message.items():
            hasher.update(f"{name} {tuple(t.shape)} ".encode() + t.contiguous().numpy().tobytes())
        digest = hasher.hexdigest()
        if digest not in self.sent:
            if len(self.sent) >= self.most:
                raise RejectedMessage("failed", f"{self.most} messages have left, as many as privacy was reckoned for")
            self.sent.append(digest)
            with atomic_files.atomic_write(self.path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(json.dumps({"secret": self.secret, "sent": self.sent}), encoding="utf-8")
        return secure_noise(bytes.fromhex(self.secret) + bytes.fromhex(digest))
