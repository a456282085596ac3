"""Random numbers by key, never by position: the same (seed, update, task, role, ...) gives the same
draw anywhere.
"""

from __future__ import annotations

import hashlib
import random


def keyed_seed(*key: object) -> int:
    """A 63-bit seed that is a function of the key's text alone (not of PYTHONHASHSEED, process or
    platform).
    """
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def keyed_random(*key: object) -> random.Random:
    """A stream of its own for this key."""
    return random.Random(keyed_seed(*key))
