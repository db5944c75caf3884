"""Division of a sweep into parts, so that machines with a common folder can share it.

What must stay on one machine stays in one part: runs with the same training, of which only the first trains, and all
candidates of one choice of a tuned sweep with the runs that use the chosen value. So a part needs no other part.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from equipoise.errors import EquipoiseError
from equipoise.runs.sweep import SweepRun, chains
from equipoise.runs.tuning import group


@dataclass(frozen=True)
class SweepPart:
    """One of several parts of a sweep."""

    number: int
    "from 1 to `of`"
    of: int

    @classmethod
    def parse(cls, text: str) -> "SweepPart":
        """Read a part from text such as 2/8.

        Args:
            text: number of the part, a slash, number of parts.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of:
            raise EquipoiseError(
                f"--shard {text} is not allowed; it must be PART/PARTS with PART between 1 and PARTS, such as 2/8"
            )
        return cls(number, of)

    def select(self, every: Sequence[SweepRun], tune: Sequence[str] = ()) -> list[SweepRun]:
        """Return the runs of this part, in the order of the sweep.

        Args:
            every: all runs of the sweep.
            tune: the settings that the sweep tunes (`Sweep.together`).
        """
        return divide(every, tune, self.of)[self.number - 1]


def divide(every: Sequence[SweepRun], tune: Sequence[str], parts: int) -> list[list[SweepRun]]:
    """Divide the runs of a sweep; parts differ in the number of trainings as little as their bundles allow.

    Args:
        every: all runs of the sweep.
        tune: the settings that the sweep tunes (`Sweep.together`).
        parts: number of parts; some are empty if there are more parts than bundles.
    """
    sizes = [0] * parts
    part_of: dict[tuple[str, int], int] = {}
    # In an order that looks random: in the order of the file, one part might get the slowest method of every seed.
    for bundle in sorted(_bundles(every, tune), key=_digest):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += len(chains(bundle))
        part_of.update({(cell.identity, cell.seed): smallest for cell in bundle})
    found: list[list[SweepRun]] = [[] for _ in range(parts)]
    for cell in every:
        found[part_of[cell.identity, cell.seed]].append(cell)
    return found


def _digest(bundle: Sequence[SweepRun]) -> bytes:
    """Return a digest of what identifies some runs, whatever their order."""
    return blake2b(" ".join(sorted(f"{cell.identity}-{cell.seed}" for cell in bundle)).encode()).digest()


def _bundles(every: Sequence[SweepRun], tune: Sequence[str]) -> list[list[SweepRun]]:
    """Join chains that take part in the same choice; without tuning, each chain is a bundle."""
    found: list[tuple[list[SweepRun], set[str]]] = []
    for chain in chains(every):
        runs, choices = list(chain), {group(cell, tune) for cell in chain} if tune else set()
        apart = []
        for other in found:
            if choices & other[1]:
                runs, choices = other[0] + runs, choices | other[1]
            else:
                apart.append(other)
        found = [*apart, (runs, choices)]
    return [runs for runs, _ in found]
