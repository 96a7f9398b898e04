"""A flow's calls to URLs of its input reach public addresses only, and exactly those that were checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from flow import outside
from flow.addresses import ForbiddenAddress
from flow.database import Connection
from flow.errors import DriveFailed
from tests.outside import Outside
from tests.pattern_runs import drive_here, start

KEY = {"Idempotency-Key": "k"}


@pytest.fixture
async def service() -> AsyncIterator[Outside]:
    async with Outside() as service:
        yield service


async def post(url: str, *, is_async: bool) -> httpx.Response:
    if is_async:
        async with outside.async_client() as http:
            return await http.post(url, json={}, headers=KEY)
    with outside.client() as http:
        return http.post(url, json={}, headers=KEY)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433"])
async def test_what_is_not_public_is_not_asked(service: Outside, host: str, is_async: bool) -> None:
    with pytest.raises(ForbiddenAddress, match="not a public address"):
        await post(f"http://{host}:{service.port}/hook", is_async=is_async)
    assert service.asked == []


async def test_a_name_with_one_address_that_is_not_public_is_not_asked(
    service: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "look_up", lambda host, port: ["93.184.215.14", "127.0.0.1"])
    with pytest.raises(ForbiddenAddress):
        await post(f"http://example.com:{service.port}/hook", is_async=True)


async def test_a_name_is_looked_up_once_and_the_address_that_was_checked_is_asked_for_the_name(
    service: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def look_up(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    monkeypatch.setattr(outside, "look_up", look_up)
    monkeypatch.setattr(outside, "is_public", lambda address: True)
    answer = await post(f"http://service.example:{service.port}/hook", is_async=True)
    assert (answer.status_code, asked) == (201, [("service.example", service.port)])
    assert answer.request.headers["Host"] == f"service.example:{service.port}"
    assert answer.request.extensions["sni_hostname"] == "service.example"


@pytest.mark.parametrize(
    ("flow", "given"),
    [
        ("fan-out", lambda url: {"urls": [url]}),
        ("batch", lambda url: {"items": ["a"], "url": url}),
        ("payment", lambda url: {"amount": "20", "url": url}),
    ],
)
async def test_no_pattern_asks_what_only_we_can_reach(
    service: Outside, conn: Connection, flow: str, given: Callable[[str], dict[str, object]]
) -> None:
    await start(conn, flow, "t1", **given(service.url))
    with pytest.raises(DriveFailed, match="not a public address"):
        await drive_here(conn, "t1")
    assert service.asked == []
