"""Uploads of which an algorithm sees only their noised mean: what central noise leaves of them."""

from dataclasses import dataclass

from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.state import State, Upload, Uploads


@dataclass(frozen=True)
class NoisedMeanUploads(Uploads):
    """Uploads of which nothing can be seen but their noised mean."""

    who: tuple[int, ...]
    noised: State
    algorithm: str
    "name of the algorithm, for the error message"

    @staticmethod
    def of(uploads: Uploads, noise: State, count: int, algorithm: str) -> "NoisedMeanUploads":
        """Add noise to the sum of uploads.

        Args:
            uploads: the uploads.
            noise: noise on their sum.
            count: number of messages in their mean.
            algorithm: name of the algorithm.
        """
        noised = {k: (t + noise[k] / count).to(t.dtype) for k, t in uploads.mean().items()}
        return NoisedMeanUploads(uploads.who, State(noised), algorithm)

    def __len__(self) -> int:
        return len(self.who)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        raise self._private()

    @property
    def like(self) -> State:
        return self.noised

    @property
    def weighted(self) -> bool:
        return False

    def mean(self) -> State:
        return self.noised

    def weights(self) -> Tensor:
        raise self._private()

    def columns(self, name: str, low: int, high: int) -> Tensor:
        raise self._private()

    def weighing(self, weights: Tensor) -> Uploads:
        raise self._private()

    def only(self, *names: str) -> "NoisedMeanUploads":
        return NoisedMeanUploads(self.who, State({k: self.noised[k] for k in names}), self.algorithm)

    def _private(self) -> EquipoiseError:
        return EquipoiseError(
            f"{self.algorithm} looks at single messages, which noise on their sum does not cover; "
            "use privacy.where = 'local'"
        )
