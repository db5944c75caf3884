"""What happens between clients and the server's average: noise, an attack, and how the average is taken."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from equipoise.attacks import Attack, AttackContext
from equipoise.config.experiment import Experiment
from equipoise.errors import EquipoiseError
from equipoise.privacy.mechanisms import Privacy
from equipoise.reducers import Mean, Reducer, WeightedMean
from equipoise.state import State, Upload, Uploads


@dataclass(frozen=True)
class AggregationPipeline:
    attack: Attack | None = None
    reducer: Reducer = field(default_factory=WeightedMean)
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        if self.privacy is not None and self.privacy.central and not isinstance(self.reducer, (Mean, WeightedMean)):
            raise EquipoiseError(
                "privacy.where = 'central' adds noise to a sum, so that reducer.name must be 'mean'; with other rules "
                "use privacy.where = 'local'"
            )

    @staticmethod
    def of(experiment: Experiment) -> "AggregationPipeline":
        return AggregationPipeline(experiment.attack, experiment.reducer, experiment.privacy)

    def attacked(
        self,
        uploads: Uploads,
        names: Sequence[str],
        malicious: Collection[str],
        server: State,
        round: int,
        seed: int,
    ) -> Uploads:
        """With what malicious clients send in place of their own; `names` are those of the senders."""
        bad = [k for k, name in enumerate(names) if name in malicious]
        if self.attack is None or not bad:
            return uploads
        own = [upload.message for upload in uploads.uploads]
        benign = tuple(message for k, message in enumerate(own) if k not in bad)
        scene = AttackContext(round, tuple(names[k] for k in bad), tuple(own[k] for k in bad), benign, server, seed)
        sent = list(uploads.uploads)
        for k, forged in zip(bad, self.attack.messages(scene), strict=True):
            if forged.shapes() != own[k].shapes():
                raise TypeError(f"{type(self.attack).__name__} sends {forged.shapes()} for {own[k].shapes()}")
            if forged.finite():  # else it would be refused: the attacker sends the truth
                sent[k] = Upload(forged, sent[k].reference, sent[k].weight)
        return Uploads(uploads.who, tuple(sent))
