"""Models to ask for advice: a real OpenAI-compatible server with fixtures, and one of ours that fails on demand.

`aimock` is the npm package that `tests/model` pins: it speaks the whole protocol, checks the key, and keeps a journal.
`FaultyModel` stands in the test's own event loop and does what no server should.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from tests import node

KEY = "sk-test-3b0e6c1f"

# The server of npm's that stands for a good model


class Aimock:
    """A running server that knows a few conversations; any other is refused with a 503."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def base_url(self) -> str:
        """What `OPENAI_BASE_URL` wants."""
        return f"{self._url}/v1"

    def journal(self) -> list[dict[str, Any]]:
        """The requests that it got, oldest first: `{"path", "body", "response": {"status"}}` and more."""
        found: list[dict[str, Any]] = json.loads(self._call("GET", "journal"))
        return found

    def trouble(self, **rates: float) -> None:
        """From now on fail at these rates: `rateLimitRate`, `malformedRate`, `disconnectRate`, `dropRate`."""
        self._call("POST", "chaos", json.dumps(rates).encode())

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/__aimock/{path}", data=body, headers=headers, method=method)
        # No proxy stands between us and this machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            read: bytes = answer.read()
            return read


@contextlib.contextmanager
def running_aimock(*conversations: tuple[str, dict[str, Any]]) -> Iterator[Aimock]:
    """A server on a free port of 127.0.0.1 that wants KEY; gone when the block ends.

    Each conversation is a text that the last message of the user contains, and the response to it:
    https://aimock.copilotkit.dev/docs
    """
    known = [{"match": {"userMessage": said}, "response": response} for said, response in conversations]
    with node.running(
        node.installed("model") / "@copilotkit" / "aimock" / "dist" / "cli.js",
        *("--port", "0", "--fixtures", "fixtures.json", "--strict", "--validate-on-load"),
        files={"fixtures.json": json.dumps({"fixtures": known})},
        environment={"AIMOCK_API_KEYS": KEY},
    ) as url:
        yield Aimock(url)


def advice(
    summary: str = "Three chairs for the office.",
    risks: tuple[str, ...] = ("no receipt",),
    *,
    needs_review: bool = False,
) -> str:
    """What a good model says."""
    return json.dumps({"summary": summary, "risks": list(risks), "needs_review": needs_review})


# The one of ours that fails

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Set when the server ends: whatever still waits may go.
_OVER = web.AppKey("over", asyncio.Event)


def content(text: str | None, *, prompt_tokens: int = 100, completion_tokens: int = 20) -> Reply:
    """A chat completion that says this."""
    return completion(
        choices=[{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        usage={
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    )


def refusal(text: str) -> Reply:
    """A chat completion in which the model refuses."""
    message = {"role": "assistant", "content": None, "refusal": text}
    return completion(choices=[{"index": 0, "finish_reason": "stop", "message": message}])


def completion(**fields: Any) -> Reply:
    """A chat completion with these fields, whatever they are."""
    shape = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return raw(json.dumps({**shape, **fields}).encode())


def raw(
    body: bytes, *, status: int = 200, content_type: str = "application/json", headers: dict[str, str] | None = None
) -> Reply:
    """These bytes."""

    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"Content-Type": content_type, **(headers or {})})

    return reply


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Reply:
    """An error as OpenAI words them."""
    return raw(json.dumps({"error": {"message": message, "type": "t"}}).encode(), status=status, headers=headers)


async def drop(request: web.Request) -> web.StreamResponse:
    """Cut the connection; no answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def hang(request: web.Request) -> web.StreamResponse:
    """Never answer."""
    await request.app[_OVER].wait()
    return web.Response()


async def drip(request: web.Request) -> web.StreamResponse:
    """Answer for ever, a byte at a time: no single wait is long."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while not request.app[_OVER].is_set():
            await response.write(b" ")
            await asyncio.sleep(0.02)
    return response


class FaultyModel:
    """A model with memory: `async with FaultyModel(hang) as model:`, then give the bot `model.base_url`.

    Each request gets the next reply; the last one is for all that follow. `requests` are the bodies of all requests,
    `authorizations` their headers of that name.
    """

    def __init__(self, *replies: Reply) -> None:
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self._replies = list(replies or [content(advice())])
        self._let_go = asyncio.Event()
        self._let_go.set()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._complete)
        app[_OVER] = self._over = asyncio.Event()
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._let_go.set()
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        """What `OPENAI_BASE_URL` wants."""
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def hold(self) -> None:
        """Keep all replies back until `release`."""
        self._let_go.clear()

    def release(self) -> None:
        self._let_go.set()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.authorizations.append(request.headers.get("Authorization", ""))
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        await self._let_go.wait()
        return await reply(request)
