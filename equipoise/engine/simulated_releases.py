"""What simulated clients release under privacy: how much is planned and done, and uploads as they leave a client."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from equipoise.algorithms.capabilities import exchanges_of
from equipoise.config.engine import Schedule
from equipoise.engine.aggregation_pipeline import AggregationPipeline
from equipoise.engine.privacy_ledger import MessageReleases, RunReleases
from equipoise.engine.sample_releases import SampleLevelReleases
from equipoise.errors import EquipoiseError
from equipoise.executors.base import SENT, ClientJob, ClientResult
from equipoise.privacy.accounting import ReleaseCount
from equipoise.privacy.correlated_noise import CorrelatedReleases, Participation, best_bands, square_root
from equipoise.privacy.mechanisms import difference, is_within, public_reference, seeded_noise
from equipoise.state import ClientStates, State, Upload
from equipoise.training.sample_privacy import SamplePrivacy

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
        self.samples: SamplePrivacy | None = None
        "how training is made private, if single samples are hidden"
        self.sizes: Mapping[str, int] = {}
        "number of training samples of each client, if single samples are hidden"
        privacy = pipeline.settings.privacy
        if privacy is not None and privacy.bands != 1:
            bands = best_bands(self._taking_part, schedule.rounds) if privacy.bands == "auto" else privacy.bands
            pipeline.bands = square_root(min(bands, schedule.rounds))
        pipeline.ledger.cohort = cohort

    def rounds_of_clients(self) -> dict[int, int]:
        """Return in how many rounds each client will take part."""
        return Counter(who for round in range(1, self.schedule.rounds + 1) for who in self.sample(round))

    @cached_property
    def _taking_part(self) -> frozenset[Participation]:
        """Return the rounds of each client, which correlated noise must know beforehand."""
        if self.exchanges > 1 or self.schedule.rounds > _DRAWN_ROUNDS:
            raise EquipoiseError(
                "privacy.bands must know all releases beforehand, so it needs an algorithm of one exchange in a round "
                f"and at most {_DRAWN_ROUNDS:,} rounds; use independent noise, privacy.bands = 1"
            )
        found = defaultdict[int, set[int]](set)
        for t in range(self.schedule.rounds):
            for who in self.sample(t + 1):
                found[who].add(t)
        return frozenset(map(frozenset, found.values()))

    def planned(self) -> RunReleases:
        """Return the most that one client will release in the whole run, given how cohorts are drawn.

        In very long runs drawing all cohorts beforehand would take hours; for them it is as many releases as there are
        rounds, which no client exceeds.
        """
        if self.samples is not None:
            rounds = {name: self.samples.rounds_of(name) for name in self.sizes}
            return SampleLevelReleases(self.samples, self.sizes, rounds)
        if (privacy := self.pipeline.settings.privacy) is None:
            return MessageReleases(ReleaseCount(0))
        if privacy.central:
            return self._central(self.schedule.rounds)
        if self.cohort == self.clients or self.schedule.rounds > _DRAWN_ROUNDS:
            return MessageReleases(ReleaseCount(self.schedule.rounds, self.exchanges))
        return MessageReleases(ReleaseCount(max(self.rounds_of_clients().values()), self.exchanges))

    def _central(self, rounds: int) -> RunReleases:
        """Return the releases of so many rounds with central noise.

        Only the server knows random cohorts. Correlated noise is accounted for without that secret, and cohorts in turn
        are none.
        """
        if self.pipeline.bands:
            return MessageReleases(CorrelatedReleases(self.pipeline.bands, self._taking_part, rounds))
        if self.schedule.cohorts == "turns":
            most = self.rounds_until(rounds)
            return MessageReleases(ReleaseCount(most, self.exchanges))
        return MessageReleases(ReleaseCount(rounds, self.exchanges, self.clients, self.cohort))

    def rounds_until(self, rounds: int) -> int:
        """Return the largest number of the first rounds that a client takes part in, with cohorts in turn."""
        return -(-rounds * self.cohort // self.clients)

    def so_far(self, rounds: int) -> RunReleases:
        """Return what clients have released in the rounds that are done."""
        privacy, released = self.pipeline.settings.privacy, self.pipeline.ledger.released
        assert privacy is not None
        if self.samples is not None:
            return SampleLevelReleases(self.samples, self.sizes, released)
        if privacy.central:
            return self._central(rounds)
        most = -(-max(released.values(), default=0) // self.exchanges)
        return MessageReleases(ReleaseCount(most, self.exchanges))

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
        if privacy.of_samples:
            return result
        if not result.finite:
            return replace(result, upload=Upload(result.upload.message))
        if self.pipeline.last is None:
            known = public_reference(result.upload, job.down)
        else:
            kept = store.get(job.who)
            known = State({k: kept[SENT + k].to(t.device) for k, t in result.upload.message.items()})
        noise = seeded_noise(self.schedule.seed, round, f"{exchange} {name}")
        ledger = self.pipeline.ledger
        upload = privacy.release(result.upload, known, ledger.sigma, noise, ledger.clip)
        if privacy.adaptive is None:
            return replace(result, upload=upload)
        short = is_within(difference(result.upload.message, known), ledger.clip)
        return replace(result, upload=upload, short=short)
