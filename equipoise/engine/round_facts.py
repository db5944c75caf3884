"""What every process of a run knows about the results of a round, whichever process has them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from equipoise.distributed.placement import Placement
from equipoise.engine.partial_uploads import PartialUploads, example_message
from equipoise.equilibrium import Solves, SolveStats
from equipoise.executors.base import ClientJob, ClientResult
from equipoise.state import RoundUploads, UploadsOfRound

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class ResultFacts:
    """What is known of a client's result without its tensors."""

    who: int
    bytes_up: int
    gradient_samples: int
    finite: bool
    weight: list[float] | None
    seconds: float | None
    solves: dict[str, Solves]
    diagnostics: dict[str, float]
    short: bool


@dataclass(frozen=True)
class RoundFacts:
    """The results of an exchange with the clients of a round."""

    results: list[ResultFacts]
    "in the order of the clients' names"
    bytes_down: int
    interrupted: bool
    "whether the user has interrupted any of the processes"


def share_facts(
    placement: Placement, jobs: Sequence[ClientJob], results: Sequence[ClientResult], interrupted: bool
) -> RoundFacts:
    """Return what is known of the results of all processes.

    Args:
        placement: which clients belong to which process.
        jobs: the jobs of this process.
        results: their results.
        interrupted: whether the user has interrupted this process.
    """
    facts = [_facts(result) for result in results]
    down = sum(job.down.nbytes for job in jobs)
    if placement.ranks.size == 1:
        return RoundFacts(facts, down, interrupted)
    gathered = placement.ranks.gather_json([[asdict(fact) for fact in facts], down, interrupted])
    return RoundFacts(
        [_parsed(fact) for part, _, _ in gathered for fact in part],
        sum(bytes_down for _, bytes_down, _ in gathered),
        any(stopped for _, _, stopped in gathered),
    )


def _facts(result: ClientResult) -> ResultFacts:
    weight = None if result.upload.weight is None else result.upload.weight.tolist()
    return ResultFacts(
        result.who,
        result.upload.wire.nbytes,
        result.gradient_samples,
        result.finite,
        weight,
        result.seconds,
        result.solves,
        result.diagnostics,
        result.short,
    )


def _parsed(fact: dict[str, Any]) -> ResultFacts:
    solves = {
        layer: Solves(**{way: SolveStats(**stats) for way, stats in found.items()})
        for layer, found in fact["solves"].items()
    }
    return ResultFacts(**{**fact, "solves": solves})


def accepted_uploads(
    placement: Placement,
    accepted: Sequence[ResultFacts],
    results: Sequence[ClientResult],
    number: Callable[[int], int],
    schema: Shapes,
    device: torch.device,
) -> UploadsOfRound:
    """Return the accepted uploads of a round.

    Args:
        placement: which clients belong to which process.
        accepted: the accepted results of all processes.
        results: the results of this process.
        number: returns the number by which the server knows a client.
        schema: shapes and number formats of an upload.
        device: where messages are.
    """
    who = tuple(number(fact.who) for fact in accepted)
    own = {number(result.who): result.upload for result in results}
    if placement.ranks.size == 1:
        return RoundUploads(who, tuple(own[each] for each in who), placement)
    weights = None
    if accepted and accepted[0].weight is not None:
        weights = torch.tensor([fact.weight for fact in accepted], dtype=schema["weight"][1], device=device).flatten()
    sent = {k: shape for k, shape in schema.items() if weights is None or k != "weight"}
    example = example_message(sent, device)
    chosen = set(who)
    return PartialUploads(who, {k: u for k, u in own.items() if k in chosen}, weights, example, placement)
