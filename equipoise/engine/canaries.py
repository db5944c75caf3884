"""Canaries: clients that send one known direction, to measure how much of it the noise of privacy lets through.

A run of canaries goes through the same engine as any other: clipping, noise, the server's sum, the sampling of
clients, and the accountant. Only training is left out. Every canary has a secret sign, and sends it in every round,
with far more than the clip. Whoever sees what the server sees guesses the signs; how often the guesses are right bounds
epsilon from below, whatever the accountant says. Two neighbouring federations differ in one canary's sign, which is as
much as they may differ: 2 C.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import randomness
from equipoise.algorithms.base import Algorithm, Reduce
from equipoise.algorithms.capabilities import UsesLastUploads
from equipoise.algorithms.local_data import LocalData, Start
from equipoise.config.engine import Engine, Schedule
from equipoise.config.uploads import UploadSettings
from equipoise.data.federation import from_clients
from equipoise.engine.last_uploads import LastUploads
from equipoise.engine.simulation import Simulation
from equipoise.privacy.epsilon_bounds import EpsilonBound, epsilon_bound
from equipoise.privacy.mechanisms import Privacy
from equipoise.privacy.membership import MembershipScores
from equipoise.state import State, Upload, Uploads
from equipoise.training.task import Task

_LOUD = 1e6
"""How many times the clip a canary sends: clipping is tested, too."""
_WORK = 20_000
"""Number of messages of a run of canaries, unless their number is given."""


class CanaryCalls(UsesLastUploads, Algorithm):
    """Clients send their secret sign in every round, and the server adds up what it receives.

    calls: what each canary sends, one row per canary; heard: for each canary, the sum of what the server saw of it.
    Under local noise a message is one number. Under central noise, of which only the sum is seen, every canary has a
    coordinate of its own.
    """

    loudness: float = _LOUD
    "size of the number that a canary sends"
    central: bool = False
    "whether the server sees only the sum of messages"
    last: bool = False
    "whether the server combines the last messages of all clients"

    def init_server(self, start: Start) -> State:
        signs = torch.from_numpy(canary_signs(start.seed, start.clients)).to(start.w0)
        calls = torch.diag(signs) if self.central else signs.unsqueeze(1)
        return State(calls=self.loudness * calls, heard=torch.zeros_like(signs))

    def broadcast(self, server: State, client: int) -> State:
        return State(call=server.calls[client])

    def local_update(self, client: State, down: State, data: LocalData) -> tuple[State, Upload]:
        return client, Upload(State(call=down.call))

    def initial_upload(self, start: Start) -> State | None:
        width = start.clients if self.central else 1
        return State(call=start.w0.new_zeros(width)) if self.last else None

    def aggregate(self, server: State, uploads: Uploads, reduce: Reduce) -> State:
        heard = server.heard.clone()
        if self.central:
            count = uploads.clients if isinstance(uploads, LastUploads) else len(uploads.who)
            total = len(heard) * reduce(uploads).call if self.last else count * reduce(uploads).call
            return State(server, heard=total if self.last else heard + total)
        for who, upload in zip(uploads.who, uploads.uploads, strict=True):
            # A last message contains all that was released before it.
            heard[who] = upload.message.call[0] if self.last else heard[who] + upload.message.call[0]
        return State(server, heard=heard)


@dataclass(frozen=True)
class CanaryRun:
    """A run of canaries: what was guessed of their signs, and what the accountant says of such a run."""

    scores: MembershipScores
    "what was heard of canaries with a positive sign, and of those with a negative one"
    guarantee: dict[str, Any]
    "as in summary.json"
    releases: int
    "number of messages of each canary"

    def bound(self, confidence: float) -> EpsilonBound:
        """Bound epsilon from below.

        Args:
            confidence: probability with which the bound holds.
        """
        rng = randomness.generator(0, "canary halves")
        return epsilon_bound(self.scores, self.guarantee["delta"], confidence, rng, threshold=0.0)


def canary_signs(seed: int, canaries: int) -> np.ndarray:
    """Return the secret signs of canaries, half of them positive."""
    return np.where(randomness.generator(seed, "canaries").permutation(canaries) % 2, 1.0, -1.0)


def run_canaries(
    privacy: Privacy,
    sigma: float,
    releases: int,
    *,
    seed: int,
    participation: float = 1.0,
    last: bool = False,
    canaries: int | None = None,
) -> CanaryRun:
    """Run canaries through the engine.

    Args:
        privacy: the settings of privacy.
        sigma: standard deviation of the noise.
        releases: number of rounds.
        seed: seed of the signs and of the noise.
        participation: fraction of the canaries in a round; below one only under central noise, where it is secret.
        last: whether the server combines the last messages of all clients.
        canaries: number of canaries; left out: as many as take a few seconds.
    """
    count = canaries or int(np.clip(_WORK // max(releases, 1), 200, 2000))
    federation = from_clients(
        [{"train": (np.zeros((1, 1)), np.zeros((1, 1)))}] * count, names=[f"{k:06d}" for k in range(count)]
    )
    fixed = privacy.model_copy(update={"sigma": sigma, "target_epsilon": None})
    schedule = Schedule(seed=seed, rounds=releases, participation=participation, evaluate_every=releases)
    algorithm = CanaryCalls(loudness=_LOUD * privacy.clip, central=privacy.central, last=last)
    task = Task(
        nn.Linear(1, 1), federation.prepared(torch.float64, False).sample(), loss="squared", dtype=torch.float64
    )
    engine = Engine(precision="float64", mode="stacked", workers=1, device="cpu")
    run = Simulation(task, federation, algorithm, schedule, engine, uploads=UploadSettings(privacy=fixed))
    run.run()
    heard: Tensor = run.server.heard
    signs = canary_signs(seed, count)
    return CanaryRun(
        MembershipScores(heard.numpy()[signs > 0], heard.numpy()[signs < 0]),
        run.pipeline.ledger.guarantee(run.releases()),
        releases,
    )
