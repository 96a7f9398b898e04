"""How often one caller may ask, counted in this process: what is too much is refused, and forgotten after a minute."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from aiohttp import web

WINDOW_S = 60.0

# Callers that are remembered at once; beyond that the one who was quiet for longest is forgotten.
_MOST_CALLERS = 10_000


class Limit:
    """At most `most` times a minute for each caller."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()

    def take(self, caller: str) -> int | None:
        """Count it: None, or in how many seconds the caller may ask again. What is refused does not count."""
        now = self._clock()
        times = self._seen.setdefault(caller, deque())
        self._seen.move_to_end(caller)
        while times and times[0] <= now - WINDOW_S:
            times.popleft()
        if len(times) >= self._most:
            return math.ceil(times[0] + WINDOW_S - now)
        times.append(now)
        if len(self._seen) > _MOST_CALLERS:
            self._seen.popitem(last=False)
        return None


def caller_of(request: web.Request) -> str:
    """The address that asks. Behind a proxy of ours it is the last that this one wrote down.

    Whoever can pretend to be our proxy gets around a limit, and around nothing else.
    """
    peer = request.remote or ""
    # Some proxies write a line of their own below what the caller sent.
    hops = ",".join(request.headers.getall("X-Forwarded-For", [])).split(",")
    return hops[-1].strip()[:64] or peer if _is_near(peer) else peer


def _is_near(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_private
    except ValueError:
        return False
