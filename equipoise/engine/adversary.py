"""The malicious clients of a run: who they are, what they remember, and what the server gets from them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm, origin_of
from equipoise.attacks import AttackContext, places
from equipoise.config.uploads import UploadSettings
from equipoise.state import RoundUploads, State, Upload, UploadsOfRound

_MEMORY = "attack.memory."


class Adversary:
    """Forges the messages of malicious clients where they arrive, by the same lines for both engines."""

    def __init__(self, settings: UploadSettings, algorithm: Algorithm, seed: int):
        """Create the adversary of a run, who controls nobody yet.

        Args:
            settings: the attack, and the reducer that it is up against.
            algorithm: the algorithm that aggregates.
            seed: the seed of the run.
        """
        self.attack, self.reducer, self.algorithm, self.seed = settings.attack, settings.reducer, algorithm, seed
        self.malicious: frozenset[str] = frozenset()
        "names of the malicious clients"
        self.clients: tuple[str, ...] = ()
        "names of all clients that train, in order"
        self.memory = State()
        "what the attackers remember of earlier rounds"

    @property
    def places(self) -> dict[str, int]:
        """Return the place of each malicious client in the order of their names."""
        return places(self.malicious)

    def forged(self, round: int, server: State, uploads: UploadsOfRound, names: Sequence[str]) -> UploadsOfRound:
        """Replace what malicious clients send; every process then has all uploads, as an attack may look at them.

        Args:
            round: the number of the round.
            server: the server's state, as the algorithm knows it.
            uploads: the accepted uploads.
            names: the names of the clients that sent them.
        """
        attack = self.attack
        if attack is None:
            return uploads
        bad = [k for k, name in enumerate(names) if name in self.malicious]
        if not (bad and attack.forges):
            self.memory = attack.remember(self._context(round, server, uploads.like, {}, {}))
            return uploads
        sent = list(uploads.uploads)
        context = self._context(
            round,
            server,
            uploads.like,
            {names[k]: sent[k] for k in bad},
            {name: sent[k] for k, name in enumerate(names) if name not in self.malicious},
        )
        for k, forged, weight in zip(bad, attack.messages(context), attack.weights(context), strict=True):
            own = sent[k]
            if forged.shapes() != own.message.shapes():
                raise TypeError(f"{type(attack).__name__} sends {forged.shapes()} for {own.message.shapes()}")
            message = forged if forged.finite() else own.message  # else it would be rejected
            sent[k] = Upload(message, own.reference, weight if _possible(weight, own.weight) else own.weight)
        self.memory = attack.remember(context)
        return RoundUploads(uploads.who, tuple(sent), uploads.placement)

    def _context(
        self, round: int, server: State, like: State, own: dict[str, Upload], benign: dict[str, Upload]
    ) -> AttackContext:
        assert self.attack is not None
        return AttackContext(
            round,
            tuple(own),
            tuple(upload.message for upload in own.values()),
            tuple(upload.message for upload in benign.values()),
            server,
            self.seed,
            benign_names=tuple(benign),
            weights=tuple(upload.weight for upload in own.values()),
            benign_weights=tuple(upload.weight for upload in benign.values()),
            clients=self.clients,
            origin=origin_of(self.algorithm, server, like) if self.attack.needs_origin else None,
            reducer=self.reducer,
            memory=self.memory,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        return {f"{_MEMORY}{name}": t for name, t in self.memory.items()}

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Restore what `tensors` returned.

        Args:
            tensors: the tensors of a checkpoint.
            device: where messages are.
        """
        found = {k.removeprefix(_MEMORY): t for k, t in tensors.items() if k.startswith(_MEMORY)}
        self.memory = State(found).to(device)


def _possible(weight: Tensor | None, own: Tensor | None) -> bool:
    """Tell whether a claimed weight can be sent in place of a client's own."""
    if weight is None or own is None or weight.shape != own.shape:
        return False
    return bool(torch.isfinite(weight).all()) and bool((weight > 0).all())
