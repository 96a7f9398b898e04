"""What a stranger sends, read with bounds: a length may be missing or wrong, and the rest may never come."""

from __future__ import annotations

import asyncio

from aiohttp import web

_TIMEOUT_S = 10.0


class BodyBroken(Exception):
    """The body is not what its Content-Encoding or its chunks say that it is, or its sender went away."""


async def read_at_most(request: web.Request, most: int) -> bytes | None:
    """The body; None if it has more than `most` bytes.

    Raises BodyBroken, and TimeoutError if it is not there in ten seconds.
    """
    read = b""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                read += chunk
                if len(read) > most:
                    return None
    except (web.RequestPayloadError, ConnectionError) as exc:
        raise BodyBroken from exc
    return read
