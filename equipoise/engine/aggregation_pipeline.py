"""The steps from the uploads of a round to the server's next state: attack, last uploads, central noise, reduction.

Both engines use the pipeline. It owns what these steps remember between rounds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.capabilities import exchanges_of, initial_upload_of
from equipoise.algorithms.local_data import Start
from equipoise.config.uploads import UploadSettings
from equipoise.engine.adversary import Adversary
from equipoise.engine.last_uploads import LastUploads, LastUploadTracker, UploadStore
from equipoise.engine.privacy_ledger import PrivacyLedger
from equipoise.engine.reduction import Reduction
from equipoise.errors import EquipoiseError
from equipoise.privacy.correlated_noise import next_noise
from equipoise.privacy.mechanisms import Noise, gaussian
from equipoise.privacy.noised_uploads import NoisedMeanUploads
from equipoise.state import State, Uploads, UploadsOfRound
from equipoise.torch_device import wide_dtype, widened
from equipoise.training.buffers import BUFFERS, without_buffers

_NOISE = "privacy.noise."
_PAST = "privacy.past."


class Snapshot(NamedTuple):
    """What the pipeline remembers, to restore it if a round is interrupted."""

    released: Counter[str]
    sums: int
    noise: State
    past: tuple[State, ...]
    reducer: State | None
    attackers: State


class AggregationPipeline:
    """Applies an attack, central noise and a reducer to uploads, and calls `Algorithm.aggregate`."""

    def __init__(
        self,
        settings: UploadSettings,
        algorithm: Algorithm,
        start: Start,
        draw_noise: Callable[[int, str], Noise],
        buffers: Tensor | None = None,
        rounds: int = 1,
        name_of: Callable[[int], str] = str,
    ):
        """Create the pipeline of a run.

        Args:
            settings: the attack, the reducer and privacy.
            algorithm: the algorithm that aggregates.
            start: what is known before the first round.
            draw_noise: returns the source of privacy's noise for a number and a purpose.
            buffers: the initial buffers, where they are averaged.
            rounds: number of rounds of the run.
            name_of: returns the name of the client with a number.
        """
        self.settings, self.algorithm, self.draw_noise = settings, algorithm, draw_noise
        self.reduction = Reduction(settings.reducer, algorithm, start, rounds, name_of)
        self.seed, self.device = start.seed, start.w0.device
        self.ledger = PrivacyLedger(settings.privacy)
        self.adversary = Adversary(settings, algorithm, start.seed)
        self.noise = State()
        "central noise that is in the sum of last uploads"
        self.bands: tuple[float, ...] = ()
        "coefficients of the matrix that correlates central noise over rounds; none if it is independent"
        self.past: tuple[State, ...] = ()
        "noise of the last rounds, the newest first, that correlated noise depends on"
        self.last: LastUploadTracker | None = None
        self.begin(start, buffers)

    @property
    def malicious(self) -> frozenset[str]:
        """Return the names of the malicious clients."""
        return self.adversary.malicious

    def begin(self, start: Start, buffers: Tensor | None = None) -> None:
        """Set what is assumed of clients that have not taken part yet.

        Args:
            start: what is known before the first round.
            buffers: the initial buffers, where they are averaged.
        """
        self.reduction.start = start
        first = initial_upload_of(self.algorithm, start)
        if first is not None and buffers is not None:
            first = State(first, **{BUFFERS: buffers})
        if first is not None and exchanges_of(self.algorithm) > 1:
            raise TypeError(f"{type(self.algorithm).__name__}: last uploads need rounds with one exchange only")
        self.last = None if first is None else LastUploadTracker(first, start.clients)

    def aggregate(
        self, round: int, server: State, uploads: UploadsOfRound, names: Sequence[str], store: UploadStore
    ) -> tuple[State, dict[int, State]]:
        """Compute the server's next state.

        Args:
            round: the number of the round.
            server: the server's state.
            uploads: the accepted uploads.
            names: the names of the clients that sent them.
            store: where the last uploads of all clients are kept.

        Returns:
            The server's next state, and what is to be kept of each upload.
        """
        if wrong := self.malicious.intersection(self.settings.reducer.trusts):
            raise EquipoiseError(
                f"the reducer trusts {min(wrong)!r}, which is malicious in this run; name an honest client, or give "
                "attack.clients without it"
            )
        uploads = self.adversary.forged(round, without_buffers(server), uploads, names)
        everyone = None if self.last is None else self.last.with_round(uploads, store)
        seen: Uploads = uploads if everyone is None else everyone
        reduce: Reduce = self.reduction.of_round(round, server)
        if self.settings.privacy is not None and self.settings.privacy.central:
            seen = self.noised(seen, everyone is not None)
            reduce = lambda noised: noised.mean()  # noqa: E731
        if BUFFERS in server:
            server = self._with_buffers(server, seen, reduce)
        else:
            server = self.algorithm.aggregate(server, seen, reduce)
        return server, {} if self.last is None or everyone is None else self.last.take(everyone)

    def _with_buffers(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        """Return the server's next state, where buffers are averaged.

        They are reduced together with the rest of the messages, so that a rule that selects clients (Krum) does not
        join one client's parameters with another's statistics. The algorithm never sees them in what it reduces.
        """
        found: list[State] = []

        def together(uploads: Uploads) -> State:
            message = reduce(uploads)
            if BUFFERS in message:
                found.append(State({BUFFERS: message[BUFFERS]}))
            return without_buffers(message)

        state = self.algorithm.aggregate(without_buffers(server), uploads, together)
        # An algorithm that reduces several groups, or its fields one by one, has no one message to take them from.
        shared = found[0] if len(found) == 1 else reduce(uploads.only(BUFFERS))
        return State(without_buffers(state), **shared)

    def noised(self, uploads: Uploads, last: bool) -> NoisedMeanUploads:
        """Add central noise to the sum of the uploads.

        A sum of last uploads is the sum before it and what the round adds: each round's noise is on what it adds, and
        remains in the sum.
        """
        noise = self.draw_noise(self.ledger.sums, "sum")
        zeros = State({k: widened(torch.zeros_like(t)) for k, t in uploads.like.items()})
        fresh = gaussian(self.ledger.sigma_of_sum)(zeros, noise)
        self.ledger.sums += 1
        if self.bands:
            fresh = next_noise(self.bands, fresh, self.past)
            self.past = (fresh, *self.past)[: len(self.bands) - 1]
        if last:
            fresh = self.noise = State({k: t + self.noise[k] if k in self.noise else t for k, t in fresh.items()})
        count = uploads.clients if isinstance(uploads, LastUploads) else len(uploads)
        return NoisedMeanUploads.of(uploads, fresh, count, type(self.algorithm).__name__)

    def snapshot(self) -> Snapshot:
        """Return what the pipeline remembers."""
        kept = self.reduction.memory, self.adversary.memory
        return Snapshot(self.ledger.released.copy(), self.ledger.sums, self.noise, self.past, *kept)

    def rollback(self, snapshot: Snapshot) -> None:
        """Restore a snapshot."""
        self.ledger.released, self.ledger.sums, self.noise, self.past = snapshot[:4]
        self.reduction.memory, self.adversary.memory = snapshot[4:]

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps as JSON."""
        return {"privacy": self.ledger.facts()}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps as tensors."""
        last = {} if self.last is None else self.last.tensors()
        noise = {f"{_NOISE}{name}": t for name, t in self.noise.items()}
        past = {f"{_PAST}{k}.{name}": t for k, drawn in enumerate(self.past) for name, t in drawn.items()}
        return last | noise | past | self.reduction.tensors() | self.adversary.tensors()

    def restore_ledger(self, facts: dict[str, Any], tensors: dict[str, Tensor], rounds: int) -> None:
        """Restore what a checkpoint saved about privacy."""
        self.ledger.restore(facts.get("privacy", {}), rounds)
        self.noise = self._restored(tensors, _NOISE)
        earlier = (self._restored(tensors, f"{_PAST}{k}.") for k in range(len(self.bands) - 1))
        self.past = tuple(noise for noise in earlier if noise)

    def _restored(self, tensors: dict[str, Tensor], prefix: str) -> State:
        """Return the saved noise whose names begin with a prefix."""
        found = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        return State({k: t.to(wide_dtype(self.device)).to(self.device) for k, t in found.items()})

    def restore_memory(self, tensors: dict[str, Tensor]) -> None:
        """Restore what a checkpoint saved of the last uploads, and what reducer and attackers remember."""
        self.reduction.restore(tensors)
        self.adversary.restore(tensors, self.device)
        if self.last is not None:
            self.last.restore(tensors)
