"""HTTP clients for a flow's calls to URLs that came with its input.

    with client() as http:
        http.post(state["url"], json=…, headers={"Idempotency-Key": idempotency_key()}).raise_for_status()

They reach public addresses only, connect to exactly the address that was checked, and follow no redirect;
WEBHOOK_ALLOW_PRIVATE lifts that for development. A call with all of its answer takes at most TIMEOUT_S, far below an
effect's lease: whoever takes over finds no call of ours still under way. An answer that takes longer, or has more than
LONGEST_ANSWER bytes, raises an httpx.TransportError; one that is compressed, which is not asked for, stays so.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx

from flow.addresses import ForbiddenAddress, is_public, look_up
from flow.settings import read_settings

TIMEOUT_S = 10
LONGEST_ANSWER = 1_000_000

# A small answer that is compressed may be a large one.
_HEADERS = {"Accept-Encoding": "identity"}
# httpx's own begin anew with each byte; the transports bring theirs.
_NO_TIMEOUT = httpx.Timeout(None)


def client() -> httpx.Client:
    return httpx.Client(timeout=_NO_TIMEOUT, headers=_HEADERS, transport=_Transport())


def async_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=_NO_TIMEOUT, headers=_HEADERS, transport=_AsyncTransport())


class _Transport(httpx.BaseTransport):
    """Each call has an event loop of its own, in a thread of its own: nothing else cuts a call off wherever it is.

    Only a look-up of the host that is under way is waited for, as long as the system's own takes.
    """

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(lambda: asyncio.run(self._call(request))).result()

    async def _call(self, request: httpx.Request) -> httpx.Response:
        async with _AsyncTransport() as transport:
            return await transport.handle_async_request(request)


class _AsyncTransport(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.to_thread(_pin, request)
                return await _whole(await super().handle_async_request(request))
        except TimeoutError as exc:
            raise httpx.TimeoutException(f"no whole answer within {TIMEOUT_S} s") from exc


async def _whole(answer: httpx.Response) -> httpx.Response:
    """The answer with its body, read. Raises ReadError if it is too long."""
    body = bytearray()
    try:
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > LONGEST_ANSWER:
                raise httpx.ReadError(f"the answer is longer than {LONGEST_ANSWER} bytes")
    finally:
        await answer.aclose()
    headers = answer.headers.copy()
    headers.pop("Content-Encoding", None)
    return httpx.Response(
        answer.status_code, headers=headers, stream=httpx.ByteStream(bytes(body)), extensions=answer.extensions
    )


def _pin(request: httpx.Request) -> None:
    """Send it to an address of its host, once all of them are allowed; it goes on asking for the host by its name.

    Raises ForbiddenAddress, or ConnectError if the host has no address.
    """
    if read_settings().webhook_allow_private:
        return
    host = request.url.host
    try:
        addresses = look_up(host, request.url.port or {"https": 443}.get(request.url.scheme, 80))
    except OSError as exc:
        raise httpx.ConnectError(str(exc), request=request) from exc
    for address in addresses:
        if not is_public(address):
            raise ForbiddenAddress(host, address)
    # The `Host` header was made of the name already.
    request.extensions = {**request.extensions, "sni_hostname": host}
    request.url = request.url.copy_with(host=addresses[0])
