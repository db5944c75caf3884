"""Clipping at a quantile of the messages' lengths, which is followed privately from round to round.

Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021. In every round each client also
tells whether its message was shorter than the clip; the server learns the noised number of those that were, and moves
the clip by a factor towards the quantile.
"""

from math import exp, sqrt
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from equipoise.errors import EquipoiseError
from equipoise.settings import Positive, Settings, read

_LARGEST_SHARE = 0.1  # of the budget that the number takes, if no other share is given


class AdaptiveClip(Settings):
    """How the clip follows a quantile of the lengths of messages."""

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    "fraction of the messages that are shorter than the clip"
    lr: Positive = 0.2
    "how fast the clip follows: its logarithm moves by at most about this much in a round"
    count_noise: Positive | None = None
    """standard deviation of the noise on the number of messages shorter than the clip; left out: a twentieth of the
    cohort, or as much as takes a tenth of the budget if that is more"""

    def noise_of_count(self, z: float, cohort: int) -> float:
        """Return the standard deviation of the noise on the number of short messages.

        Args:
            z: noise multiplier that a round has altogether.
            cohort: number of clients in a round.
        """
        if self.count_noise is None:
            return max(cohort / 20, z / sqrt(_LARGEST_SHARE))
        if self.count_noise <= z:
            raise EquipoiseError(
                f"privacy.adaptive.count_noise = {self.count_noise:g} alone reveals more than is allowed; it must be "
                f"more than the noise multiplier of a round, {z:.4g}"
            )
        return self.count_noise

    def noise_of_messages(self, z: float, cohort: int) -> float:
        """Return the noise multiplier of the sum of messages, so that sum and number together have z.

        If one client is replaced, the sum moves by at most 2 C and the number by at most 1, so both together are one
        Gaussian mechanism with 1 / z^2 = 1 / z_messages^2 + 1 / z_number^2. In the paper's units, in which a multiplier
        is relative to C, this is its z_messages = (z^-2 - (2 sigma_b)^-2)^(-1/2).
        """
        if z == 0:
            return 0.0
        return 1 / sqrt(z**-2 - self.noise_of_count(z, cohort) ** -2)

    def next(self, clip: float, fraction: float) -> float:
        """Return the clip of the next round.

        Args:
            clip: the clip of this round.
            fraction: the fraction of messages that were shorter, with noise.
        """
        return clip * exp(-self.lr * (fraction - self.quantile))


def _of(value: Any) -> Any:
    return read(AdaptiveClip, value, "privacy.adaptive") if isinstance(value, dict) else value


AdaptiveClipSetting = Annotated[AdaptiveClip, BeforeValidator(_of), WithJsonSchema({"type": "object"})]
