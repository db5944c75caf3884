"""The settings of a run that act on uploads: an attack, a reducer and privacy."""

from dataclasses import dataclass, field

from equipoise.attacks import Attack
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import Mean, Reducer, WeightedMean


@dataclass(frozen=True)
class UploadSettings:
    """What happens to uploads on their way to the server's next state."""

    attack: Attack | None = None
    reducer: Reducer = field(default_factory=WeightedMean)
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        if self.privacy is not None and self.privacy.central and not isinstance(self.reducer, (Mean, WeightedMean)):
            raise EquipoiseError(
                "privacy.where = 'central' adds noise to a sum, so that reducer.name must be 'mean'; with other rules "
                "use privacy.where = 'local'"
            )
