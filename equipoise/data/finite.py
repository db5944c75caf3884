"""Search for NaN and infinity in the clients' data before anything is trained on them."""

import numpy as np
import torch
from torch import Tensor

from equipoise.data.federation import SPLITS, Federation
from equipoise.errors import EquipoiseError

_PLACES = 5  # most columns that are named


def check_finite(federation: Federation) -> None:
    """Raise an error that names client, split and columns if a client's inputs or targets are not all finite."""
    if federation.finite:
        return
    finite = [torch.isfinite(t).reshape(len(t), -1).all(1) for t in (federation.x, federation.y)]
    bad = ~(finite[0] & finite[1]).numpy()
    owners = [
        (who, split)
        for who in range(len(federation))
        for split in SPLITS
        if bad[getattr(federation, split)[who]].any()  # samples that nobody owns do no harm
    ]
    if not owners:
        return
    who, split = owners[0]
    pair = federation.gather(torch.from_numpy(getattr(federation, split)[who]))
    what, values = next((w, v) for w, v in zip(("inputs", "targets"), pair, strict=True) if not _all_finite(v))
    others = len({owner for owner, _ in owners}) - 1
    also = "" if not others else "; another client has some too" if others == 1 else f"; {others} other clients do too"
    raise EquipoiseError(
        f"client {federation.names[who]!r} has {_counted(split, what, values)}{also}; remove or replace "
        "them before training"
    )


def _all_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _counted(split: str, what: str, values: Tensor) -> str:
    """Return how many values are not finite, and where they are."""
    bad = ~torch.isfinite(values)
    samples = int(bad.reshape(len(bad), -1).any(1).sum())
    text = f"{int(bad.sum())} NaN or infinite values in the {what} of {samples} of its {len(bad)} {split} samples"
    if bad.ndim == 1:
        return text
    counts = bad.sum(0).numpy()
    places = np.argwhere(counts)
    word = "column" if counts.ndim == 1 else "feature"
    named = [f"{word} {p.tolist() if len(p) > 1 else p[0]}: {counts[tuple(p)]}" for p in places[:_PLACES]]
    more = f", and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
    return f"{text} ({', '.join(named)}{more})"
