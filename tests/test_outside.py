"""A flow's calls to URLs of its input reach public addresses only, exactly those that were checked, and end."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from flow import outside
from flow.addresses import ForbiddenAddress
from flow.database import Connection
from flow.errors import DriveFailed
from tests.outside import Outside
from tests.pattern_runs import drive_here, start

KEY = {"Idempotency-Key": "k"}

each_pattern = pytest.mark.parametrize(
    ("flow", "given"),
    [
        ("fan-out", lambda url: {"urls": [url]}),
        ("batch", lambda url: {"items": ["a"], "url": url}),
        ("payment", lambda url: {"amount": "20", "url": url}),
    ],
)


@pytest.fixture
async def service() -> AsyncIterator[Outside]:
    async with Outside() as service:
        yield service


async def post(url: str, *, is_async: bool) -> httpx.Response:
    if is_async:
        async with outside.async_client() as http:
            return await http.post(url, json={}, headers=KEY)
    return await asyncio.to_thread(post_sync, url)


def post_sync(url: str) -> httpx.Response:
    with outside.client() as http:
        return http.post(url, json={}, headers=KEY)


@contextlib.asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of a service that lets this write its answers, whatever they are, and then hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    finally:
        server.close()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433"])
async def test_what_is_not_public_is_not_asked(service: Outside, host: str, is_async: bool) -> None:
    with pytest.raises(ForbiddenAddress, match="not a public address"):
        await post(f"http://{host}:{service.port}/hook", is_async=is_async)
    assert service.asked == []


async def test_a_sync_client_may_be_used_where_an_event_loop_runs() -> None:
    with pytest.raises(ForbiddenAddress):
        post_sync("http://127.0.0.1:1/")


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


@each_pattern
async def test_no_pattern_asks_what_only_we_can_reach(
    service: Outside, conn: Connection, flow: str, given: Callable[[str], dict[str, object]]
) -> None:
    await start(conn, flow, "t1", **given(service.url))
    with pytest.raises(DriveFailed, match="not a public address"):
        await drive_here(conn, "t1")
    assert service.asked == []


# How long, and how much


BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
HEADER = b"HTTP/1.1 200 OK\r\nX-Long: "


async def drip(writer: asyncio.StreamWriter, before: bytes) -> None:
    """A hundred bytes more, each long before anybody who waits for a byte gives up."""
    writer.write(before)
    for _ in range(100):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("before", [BODY, HEADER], ids=["body", "header"])
async def test_a_service_that_answers_drop_by_drop_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, before: bytes, is_async: bool
) -> None:
    monkeypatch.setenv("WEBHOOK_ALLOW_PRIVATE", "true")
    monkeypatch.setattr(outside, "TIMEOUT_S", 0.5)
    async with answering(lambda writer: drip(writer, before)) as url:
        with pytest.raises(httpx.TimeoutException, match=r"no whole answer within 0\.5 s"):
            await post(url, is_async=is_async)


@each_pattern
async def test_no_pattern_waits_for_a_service_that_answers_drop_by_drop(
    conn: Connection, monkeypatch: pytest.MonkeyPatch, flow: str, given: Callable[[str], dict[str, object]]
) -> None:
    monkeypatch.setenv("WEBHOOK_ALLOW_PRIVATE", "true")
    monkeypatch.setattr(outside, "TIMEOUT_S", 0.5)
    async with answering(lambda writer: drip(writer, BODY)) as url:
        await start(conn, flow, "t1", **given(url))
        with pytest.raises(DriveFailed, match="no whole answer"):
            await drive_here(conn, "t1")


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_answer_that_is_too_long_is_read_no_further(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    monkeypatch.setenv("WEBHOOK_ALLOW_PRIVATE", "true")

    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(200):
            writer.write(b"x" * 100_000)
            await writer.drain()

    async with answering(flood) as url:
        with pytest.raises(httpx.ReadError, match="longer than 1000000 bytes"):
            await post(url, is_async=is_async)


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_answer_that_unfolds_is_not_unfolded(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    """A thousand bytes of it may be a million."""
    monkeypatch.setenv("WEBHOOK_ALLOW_PRIVATE", "true")
    body = gzip.compress(b"x" * 10_000_000)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + body)
        await writer.drain()

    async with answering(answer) as url:
        answered = await post(url, is_async=is_async)
    assert (answered.status_code, answered.content == body) == (200, True)
    assert answered.request.headers["Accept-Encoding"] == "identity"


async def test_an_answer_within_the_limits_comes_whole(monkeypatch: pytest.MonkeyPatch, service: Outside) -> None:
    monkeypatch.setenv("WEBHOOK_ALLOW_PRIVATE", "true")
    for is_async in (True, False):
        answer = await post(f"{service.url}/hook", is_async=is_async)
        assert (answer.status_code, answer.json()) == (201, {"reference": "O-1"})
