"""The audit of a finished run: what attacks learn from its models, and what that says of its epsilon."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from equipoise import randomness
from equipoise.engine.canaries import run_canaries
from equipoise.engine.simulation import Simulation
from equipoise.errors import EquipoiseError
from equipoise.privacy.epsilon_bounds import epsilon_bound
from equipoise.privacy.membership import MembershipScores, each_against_others, likelihood_ratios
from equipoise.runs.audit_report import Attack, AuditReport
from equipoise.runs.shadow_runs import (
    Candidates,
    confidence,
    confidences,
    participation_of,
    shadow_run,
    shadow_seed,
    without_clients,
)

Unit = Literal["sample", "client", "canary"]
UNITS: tuple[Unit, ...] = ("sample", "client", "canary")
_DELTA = 1e-5
"""Delta of the bounds of a run without privacy."""
_SAMPLES = 50
"""Largest number of a client's training samples by which it is recognised."""
_LEAST_CLIENTS = 8
"""Clients below which half of them say little about the whole federation."""


@dataclass(frozen=True)
class AuditSettings:
    """What is attacked, and how hard."""

    units: tuple[Unit, ...] = UNITS
    "what is attacked: samples, clients, canaries"
    shadows: int = 16
    "number of shadow runs for each of samples and clients; 0: only attacks that need none"
    samples: int = 2000
    "largest number of training samples that are attacked, and of test samples"
    canaries: int | None = None
    "number of canaries; left out: as many as take a few seconds"
    confidence: float = 0.95
    "probability with which a bound of epsilon holds"
    seed: int = 0
    "seed of the candidates, the shadow runs and the canaries"

    def __post_init__(self) -> None:
        if self.shadows and (self.shadows < 4 or self.shadows % 2):
            raise EquipoiseError(
                f"--shadows {self.shadows} is not allowed; shadow runs come in pairs, so it must be an even number "
                "from 4, or 0 for attacks without them"
            )
        if self.samples < 1 or (self.canaries is not None and self.canaries < 20):
            raise EquipoiseError("an audit needs --samples of at least 1 and --canaries of at least 20")
        if not 0.5 <= self.confidence < 1:
            raise EquipoiseError(
                f"--confidence {self.confidence:g} is not allowed; it must be from 0.5 to below 1, such as 0.95"
            )


@dataclass
class _Audit:
    """An audit in progress."""

    run: Simulation
    settings: AuditSettings
    guarantee: dict[str, Any] | None
    progress: Callable[[int, int], None]
    attacks: list[Attack] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    done: int = 0

    @property
    def steps(self) -> int:
        """Return the number of shadow runs that are planned."""
        return self.settings.shadows * (("sample" in self.settings.units) + ("client" in self.settings.units))

    def step(self) -> None:
        """Report that another shadow run is done."""
        self.done += 1
        self.progress(self.done, self.steps)

    def add(self, attack: str, unit: Unit, model: str, scores: MembershipScores) -> None:
        """Add the figures of an attack."""
        rng = randomness.generator(self.settings.seed, "audit halves", attack, unit, model)
        delta = _DELTA if self.guarantee is None else self.guarantee["delta"]
        bound = epsilon_bound(scores, delta, self.settings.confidence, rng)
        covered = self._covers(unit, model)
        epsilon = self.guarantee["epsilon_run"] if covered and self.guarantee is not None else None
        self.attacks.append(Attack(attack, unit, model, scores, bound, covered, epsilon))

    def _covers(self, unit: Unit, model: str) -> bool:
        """Tell whether the run's guarantee, if it has one, covers what an attack looks at.

        Global models are made of released messages alone. Personal models are made of a client's own samples, and only
        privacy of samples covers these.
        """
        return unit == "sample" if self.of_samples else model != "personal"

    @property
    def of_samples(self) -> bool:
        """Tell whether the run's guarantee is about single samples, and not about all samples of a client."""
        return self.guarantee is not None and self.guarantee.get("unit", "client") == "sample"

    def samples(self) -> None:
        """Attack samples: was this sample in its client's training set?"""
        run, settings = self.run, self.settings
        candidates = Candidates.draw(run, settings.samples, settings.seed)
        observed = confidences(run, candidates)
        if not observed:
            self.notes.append(f"{type(run.algorithm).__name__} has neither personal models nor a global one to attack")
            return
        for kind, values in observed.items():
            self.add("loss threshold", "sample", kind, _divided(values, candidates.member))
        found: dict[str, list[np.ndarray]] = {kind: [] for kind in observed}
        inside: list[np.ndarray] = []
        for pair in range(settings.shadows // 2):
            for k, half in enumerate(candidates.halves(run.federation, settings.seed, pair)):
                seed = shadow_seed(settings.seed, "shadow of samples", 2 * pair + k)
                shadow = shadow_run(run, candidates.federation(run.federation, half), seed)
                for kind, values in confidences(shadow, candidates).items():
                    found[kind].append(values)
                inside.append(half)
                self.step()
        for kind, rows in found.items() if inside else ():
            scores = likelihood_ratios(observed[kind], np.stack(rows), np.stack(inside))
            self.add("likelihood ratio", "sample", kind, _divided(scores, candidates.member))

    def clients(self) -> None:
        """Attack clients: was this client in the federation? Shadow runs attack each other, as the run has all."""
        run, settings = self.run, self.settings
        if not settings.shadows:
            self.notes.append("without shadow runs nothing tells whether a client took part")
            return
        if run.algorithm.global_model(run.server) is None or run.global_module(run.training[0]) is None:
            self.notes.append(f"{type(run.algorithm).__name__} has no global model that would tell who took part")
            return
        if len(run.training) < _LEAST_CLIENTS:
            self.notes.append(f"half of {len(run.training)} clients are too few for shadow runs of the federation")
            return
        clients = np.array(run.training)
        samples = [run.federation.train[who][:_SAMPLES] for who in clients]
        starts = np.cumsum([0, *map(len, samples)])[:-1]
        values, inside = [], []
        for pair in range(settings.shadows // 2):
            chosen = randomness.generator(settings.seed, "shadow clients", pair).permutation(len(clients))
            for k, half in enumerate((chosen % 2 == 0, chosen % 2 == 1)):
                seed = shadow_seed(settings.seed, "shadow of clients", 2 * pair + k)
                left_out = np.concatenate([clients[~half], _unseen(run)])
                shadow = shadow_run(run, without_clients(run.federation, left_out), seed)
                module = shadow.global_module(shadow.training[0])
                assert module is not None
                each = confidence(shadow, module, np.concatenate(samples))
                values.append(np.add.reduceat(each, starts) / np.diff(np.append(starts, len(each))))
                inside.append(half)
                self.step()
        self.add("likelihood ratio", "client", "global", each_against_others(np.stack(values), np.stack(inside)))

    def canaries(self) -> None:
        """Attack the mechanism itself, with clients that send one known direction."""
        run, privacy = self.run, self.run.pipeline.settings.privacy
        if privacy is None or self.guarantee is None:
            self.notes.append("the run has no section [privacy], so there is no mechanism to try with canaries")
            return
        if self.of_samples:
            self.notes.append("canaries are clients, and the noise of this run is there for single samples")
            return
        # Cohorts in turn are no secret.
        secret = getattr(run.schedule, "cohorts", "random") == "random" and run.cohort < len(run.training)
        sampled = privacy.central and secret
        for fraction in (1.0, participation_of(run)) if sampled else (1.0,):
            found = run_canaries(
                privacy,
                self.guarantee["sigma"],
                self.guarantee["releases"],
                seed=shadow_seed(self.settings.seed, "canaries", 0),
                participation=fraction,
                last=run.pipeline.last is not None,
                canaries=self.settings.canaries,
            )
            always = fraction == 1.0
            # With secret cohorts, or noise that depends on who takes part when, the run's epsilon is not that of
            # clients that are always there.
            own = always and (sampled or getattr(privacy, "bands", 1) != 1)
            epsilon = (found.guarantee if own else self.guarantee)["epsilon_run"]
            name = "canaries" if always else "canaries, sampled"
            seen = "sum of uploads" if privacy.central else "uploads"
            bound = found.bound(self.settings.confidence)
            # Sampling makes a mixture of normal distributions, of which the larger bound does not hold.
            self.attacks.append(Attack(name, "client", seen, found.scores, bound, True, epsilon, gaussian=always))


def _divided(scores: np.ndarray, member: np.ndarray) -> MembershipScores:
    return MembershipScores(scores[member], scores[~member])


def _unseen(run: Simulation) -> np.ndarray:
    return np.array([who for who, name in enumerate(run.federation.names) if name in run.federation.unseen], dtype=int)


def guarantee_of(run: Simulation) -> dict[str, Any] | None:
    """Return what the summary of a run says of its privacy, or would say of a run in memory; None without privacy."""
    if run.pipeline.settings.privacy is None:
        return None
    if run.folder is not None and run.folder.summary.exists():
        found: dict[str, Any] = run.folder.read_summary()["privacy"]
        return found
    return run.pipeline.ledger.guarantee(run.releases())


def audit(
    run: Simulation, settings: AuditSettings | None = None, progress: Callable[[int, int], None] | None = None
) -> AuditReport:
    """Attack a finished run.

    Args:
        run: the run, as it was after its last round.
        settings: what is attacked, and how hard.
        progress: is called with the numbers of finished shadow runs and of all of them.
    """
    settings = settings or AuditSettings()
    _check(run, settings.units)
    guarantee = guarantee_of(run)
    at_work = _Audit(run, settings, guarantee, progress or (lambda done, total: None))
    for unit, attack in (("canary", at_work.canaries), ("sample", at_work.samples), ("client", at_work.clients)):
        if unit in settings.units:
            attack()
    return AuditReport(type(run.algorithm).__name__, run.done, at_work.done, guarantee, at_work.attacks, at_work.notes)


def _check(run: Simulation, units: Sequence[str]) -> None:
    if run.pipeline.settings.attack is not None:
        raise EquipoiseError("an audit needs a run without malicious clients; leave out the section [attack]")
    federation = run.federation
    if "sample" in units and (federation.chronological or federation.series is not None):
        raise EquipoiseError(
            "training and test samples are from different times, so they differ even if nothing was learned by heart; "
            "audit other units: --unit client --unit canary"
        )
