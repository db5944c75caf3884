"""What simulated clients release under privacy: how much is planned and done, and uploads as they leave a client."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from equipoise.algorithms.capabilities import exchanges_of
from equipoise.config.engine import Schedule
from equipoise.engine.aggregation_pipeline import AggregationPipeline
from equipoise.executors.base import SENT, ClientJob, ClientResult
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.mechanisms import public_reference, seeded_noise
from equipoise.state import ClientStates, State, Upload

_DRAWN_ROUNDS = 100_000
"""The largest number of rounds whose cohorts are drawn before the first one."""


class SimulatedReleases:
    """The releases of the clients of a simulation."""

    def __init__(
        self,
        pipeline: AggregationPipeline,
        schedule: Schedule,
        clients: int,
        cohort: int,
        sample: Callable[[int], list[int]],
    ):
        """Prepare for a run.

        Args:
            pipeline: the aggregation pipeline, which owns the ledger.
            schedule: the schedule of the run.
            clients: number of clients that train.
            cohort: number of clients in a round.
            sample: draws the clients of a round.
        """
        self.pipeline, self.schedule, self.clients, self.cohort = pipeline, schedule, clients, cohort
        self.sample, self.exchanges = sample, exchanges_of(pipeline.algorithm)

    def planned(self) -> ReleaseCount:
        """Return the most that one client will release in the whole run, given how cohorts are drawn.

        In very long runs drawing all cohorts beforehand would take hours; for them it is as many releases as there are
        rounds, which no client exceeds.
        """
        if (privacy := self.pipeline.settings.privacy) is None:
            return ReleaseCount(0)
        if privacy.central:
            return self._central(self.schedule.rounds)
        if self.cohort == self.clients or self.schedule.rounds > _DRAWN_ROUNDS:
            return ReleaseCount(self.schedule.rounds, self.exchanges)
        drawn = Counter(who for round in range(1, self.schedule.rounds + 1) for who in self.sample(round))
        return ReleaseCount(max(drawn.values()), self.exchanges)

    def _central(self, rounds: int) -> ReleaseCount:
        """Return the releases of so many rounds with central noise, where only the server knows the cohorts."""
        return ReleaseCount(rounds, self.exchanges, self.clients, self.cohort)

    def so_far(self, rounds: int) -> ReleaseCount:
        """Return what clients have released in the rounds that are done."""
        privacy, released = self.pipeline.settings.privacy, self.pipeline.ledger.released
        assert privacy is not None
        if privacy.central:
            return self._central(rounds)
        return ReleaseCount(-(-max(released.values(), default=0) // self.exchanges), self.exchanges)

    def released(
        self, round: int, exchange: int, job: ClientJob, result: ClientResult, name: str, store: ClientStates
    ) -> ClientResult:
        """Return a result whose upload is clipped and noised, as it leaves the client.

        Args:
            round: number of the round.
            exchange: number of the exchange in the round.
            job: what the client was asked.
            result: what it made of it.
            name: name of the client.
            store: the clients' states before the round.
        """
        privacy = self.pipeline.settings.privacy
        assert privacy is not None
        if not result.finite:
            return replace(result, upload=Upload(result.upload.message))
        if self.pipeline.last is None:
            known = public_reference(result.upload, job.down)
        else:
            kept = store.get(job.who)
            known = State({k: kept[SENT + k].to(t.device) for k, t in result.upload.message.items()})
        noise = seeded_noise(self.schedule.seed, round, f"{exchange} {name}")
        return replace(result, upload=privacy.release(result.upload, known, self.pipeline.ledger.sigma, noise))
