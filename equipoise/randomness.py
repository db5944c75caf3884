"""Random numbers drawn from what they are for, never from a running stream.

A draw depends on (seed, purpose, and whatever else names it: the round, the client's name) and on nothing
that happened before it. So a resumed run, another order of clients, more threads or another engine all
see the same numbers.
"""

from hashlib import blake2b

import numpy as np
import torch


def key(seed: int, purpose: str, *parts: int | str) -> int:
    """A 128-bit number that stands for this draw and no other."""
    named = (int(seed), purpose, *(str(p) if isinstance(p, str) else int(p) for p in parts))
    return int.from_bytes(blake2b(repr(named).encode(), digest_size=16).digest(), "little")


def generator(seed: int, purpose: str, *parts: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *parts)))


def torch_generator(seed: int, purpose: str, *parts: int | str) -> torch.Generator:
    """The same for torch; several times cheaper to make, so it serves what every client needs in every round."""
    return torch.Generator().manual_seed(key(seed, purpose, *parts) % 2**63)
