"""Statistics of a federation: samples per client and label, and how much the clients differ."""

from typing import Any

import numpy as np

from equipoise.data.federation import SPLITS, Federation


def outline(federation: Federation) -> dict[str, Any]:
    """Return the samples per client and label, for reports; of many clients, a selection spread over the list."""
    shown = np.unique(np.linspace(0, len(federation) - 1, min(_OUTLINED, len(federation))).round().astype(int))
    counts = label_counts(federation)
    return {
        "clients": len(federation),
        "names": [federation.names[i] for i in shown],
        "samples": [len(owned(federation, i)) for i in shown],
        "labels": None if counts is None else counts[shown].tolist(),
    }


_OUTLINED = 300


def owned(federation: Federation, who: int) -> np.ndarray:
    """Return the indices of all samples of a client."""
    return np.concatenate([getattr(federation, split)[who] for split in SPLITS])


def label_counts(federation: Federation) -> np.ndarray | None:
    """Return the number of samples per client and label (in texts: of target characters); None for numeric targets."""
    if federation.classes is None:
        return None
    labels = federation.y.numpy().reshape(len(federation.y), -1)
    return np.stack(
        [
            np.bincount(labels[owned(federation, i)].ravel(), minlength=federation.classes)
            for i in range(len(federation))
        ]
    )


def total_variation(counts: np.ndarray) -> np.ndarray:
    """Return the distance of each client's label distribution to that of all clients together, from 0 to 1."""
    own = counts / counts.sum(1, keepdims=True)
    pooled = counts.sum(0) / counts.sum()
    return np.asarray(np.abs(own - pooled).sum(1) / 2)


def gini(values: np.ndarray) -> float:
    """Return the Gini coefficient: 0 if all values are equal, near 1 if one has nearly all of the sum."""
    ordered, n = np.sort(np.asarray(values, dtype=np.float64)), len(values)
    total = ordered.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total)) if total > 0 else 0.0


def federation_statistics(federation: Federation) -> dict[str, Any]:
    """Return the numbers that `equipoise show` prints."""
    splits = {split: getattr(federation, split).lengths for split in SPLITS}
    sizes = np.sum(list(splits.values()), axis=0)
    found: dict[str, Any] = {
        "data": federation.title,
        "clients": len(federation),
        "unseen": len(federation.unseen),
        "samples": int(sizes.sum()),
        **{split: int(lengths.sum()) for split, lengths in splits.items()},
        "smallest client": int(sizes.min()),
        "median client": float(np.median(sizes)),
        "largest client": int(sizes.max()),
        "without test samples": int((splits["test"] == 0).sum()),
        "Gini of sizes": round(gini(sizes), 4),
    }
    counts = label_counts(federation)
    if counts is not None:
        have = (counts > 0).sum(1)
        found["labels"] = int((counts.sum(0) > 0).sum())
        found["labels a client, fewest"] = int(have.min())
        found["labels a client, mean"] = round(float(have.mean()), 2)
        found["labels a client, most"] = int(have.max())
        found["mean total-variation distance"] = round(float(total_variation(counts).mean()), 4)
    return found
