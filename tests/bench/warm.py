"""The inner side of a comparison in warm processes: a program that starts and resumes claims as it is told on stdin.

    start PREFIX COUNT      one line in: so many claims, one after the other, with ids PREFIX-0, PREFIX-1, …
    {"took_ms": […], "cpu_ms": …}       one line out: of each claim, and this process's own of all of them

Only the standard library, since one of the programs has an environment of its own.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable

# Takes a claim's id.
Act = Callable[[str], Awaitable[None]]

READY = "ready"


async def answer(*, start: Act, resume: Act) -> None:
    """Do what is asked until stdin ends. A few claims of its own come first: whoever measures finds it warm."""
    acts = {"start": start, "resume": resume}
    for _ in range(5):
        own = f"warm-up-{uuid.uuid4()}"
        for act in acts.values():
            await act(own)
    # As a stand-by does.
    gc.collect()
    gc.freeze()
    _say(READY)
    for line in sys.stdin:
        name, prefix, count = line.split()
        took, cpu_began = [], time.process_time()
        for number in range(int(count)):
            began = time.perf_counter()
            await acts[name](f"{prefix}-{number}")
            took.append((time.perf_counter() - began) * 1000)
        _say(json.dumps({"took_ms": took, "cpu_ms": (time.process_time() - cpu_began) * 1000}))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
