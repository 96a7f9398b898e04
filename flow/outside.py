"""HTTP clients for a flow's calls to URLs that came with its input.

    with client() as http:
        http.post(state["url"], json=…, headers={"Idempotency-Key": idempotency_key()}).raise_for_status()

They reach public addresses only, connect to exactly the address that was checked, and follow no redirect;
WEBHOOK_ALLOW_PRIVATE lifts that for development. A call takes at most TIMEOUT_S, far below an effect's lease: whoever
takes over finds no call of ours still under way.
"""

from __future__ import annotations

import asyncio

import httpx

from flow.addresses import ForbiddenAddress, is_public, look_up
from flow.settings import read_settings

TIMEOUT_S = 10


def client() -> httpx.Client:
    return httpx.Client(timeout=TIMEOUT_S, transport=_Transport())


def async_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=TIMEOUT_S, transport=_AsyncTransport())


class _Transport(httpx.HTTPTransport):
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        _pin(request)
        return super().handle_request(request)


class _AsyncTransport(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await asyncio.to_thread(_pin, request)
        return await super().handle_async_request(request)


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
