"""Device classes: the iteration limits of equilibrium solves in training, which differ between clients."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from equipoise import randomness
from equipoise.errors import EquipoiseError
from equipoise.settings import Count, Settings

Share = Annotated[float, Field(gt=0, le=1)]


class Devices(Settings):
    """Device classes: an iteration limit for each class, and the fraction of the clients in it."""

    iterations: tuple[Count, ...] = ()
    "largest number of iterations of a solve in training, forward and backward, for each class; empty: the model's own"
    fractions: tuple[Share, ...] = ()
    "fraction of the clients in each class, drawn from the seed; they sum to 1"

    def model_post_init(self, _: object) -> None:
        if len(self.iterations) != len(self.fractions):
            raise EquipoiseError(
                f"devices.iterations has {len(self.iterations)} classes and devices.fractions {len(self.fractions)}; "
                "each class needs both"
            )
        if self.fractions and abs(sum(self.fractions) - 1) > 1e-6:
            raise EquipoiseError(
                f"devices.fractions = {list(self.fractions)} is not allowed; they must sum to 1, "
                f"not {sum(self.fractions):g}"
            )

    def budgets(self, names: Sequence[str], seed: int) -> dict[str, int]:
        """Return the iteration limit of each of these clients; empty if there are no classes."""
        if not self.iterations:
            return {}
        ordered = sorted(names)
        ends = np.round(np.cumsum(self.fractions) * len(ordered)).astype(int)
        drawn = randomness.generator(seed, "devices").permutation(len(ordered))
        classes = np.searchsorted(ends, np.arange(len(ordered)), side="right").clip(max=len(ends) - 1)
        return {ordered[i]: self.iterations[c] for i, c in zip(drawn, classes, strict=True)}
