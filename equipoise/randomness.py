"""Random numbers that depend on their purpose, never on a running stream.

A draw depends only on the seed, its purpose, and what else identifies it, such as the round and the client's name. It
does not depend on earlier draws. So a resumed run, another order of clients, more threads or another engine all use the
same numbers.
"""

from hashlib import blake2b

import numpy as np
import torch


def key(seed: int, purpose: str, *parts: int | str) -> int:
    """Return the 128-bit key of a draw, which is different for every draw."""
    named = (int(seed), purpose, *(str(p) if isinstance(p, str) else int(p) for p in parts))
    return int.from_bytes(blake2b(repr(named).encode(), digest_size=16).digest(), "little")


def generator(seed: int, purpose: str, *parts: int | str) -> np.random.Generator:
    """Return numpy's generator for a draw."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *parts)))


def torch_generator(seed: int, purpose: str, *parts: int | str) -> torch.Generator:
    """Return torch's generator for a draw; it is much faster to create, so it is used for every client and round."""
    return torch.Generator().manual_seed(key(seed, purpose, *parts) % 2**63)
