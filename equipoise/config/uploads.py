"""Settings of a run that act on uploads: an attack, a reducer and privacy."""

from dataclasses import dataclass, field

from equipoise.attacks import Attack
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import Mean, Reducer, WeightedMean


@dataclass(frozen=True)
class UploadSettings:
    """What happens to uploads before the server aggregates them."""

    attack: Attack | None = None
    reducer: Reducer = field(default_factory=WeightedMean)
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        if self.privacy is not None and self.privacy.central and not isinstance(self.reducer, (Mean, WeightedMean)):
            raise EquipoiseError(
                "privacy.where = 'central' adds noise to a sum, so reducer.name must be 'mean'; with other reducers "
                "use privacy.where = 'local'"
            )
