"""Random tests that can be had again."""

from __future__ import annotations

import os
import random
import sys


def seeded() -> random.Random:
    """A random generator, new in each run; SEED, from the output of a run that failed, brings that run's back."""
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(1 << 32))
    sys.stdout.write(f"SEED={seed}\n")
    return random.Random(seed)
