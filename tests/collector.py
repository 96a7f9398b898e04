"""A collector: it takes traces by OTLP, checks them strictly, remembers them, and can be told to fail."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.bank import cut

_INTERNAL, _CLIENT = 1, 3


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How one request is answered. `held`: not before this is set. `lost`: it is taken, and no answer ever arrives."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str = "{}"
    kind: str = "application/json"
    held: asyncio.Event | None = None
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Got:
    """One span as it came. `above`: its parent; none: it is a root."""

    trace: str
    id: str
    above: str | None
    name: str
    kind: int
    start_ns: int
    end_ns: int
    error: str | None
    said: dict[str, Any]
    about: dict[str, Any]


@dataclass
class Collector:
    """`async with Collector() as collector`: takes traces at `collector.url`; whatever is no OTLP is a mistake.

    `wants`: headers without which it says 401. `poison`: a request with a span of this name is answered by
    `poisoned`, whatever else is in it.
    """

    path: str = "/v1/traces"
    wants: dict[str, str] = field(default_factory=dict)
    poison: str = ""
    poisoned: int = 400
    port: int = 0
    # Each request that was taken, in order.
    requests: list[list[Got]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    # Also of those that were not taken.
    asked: int = 0
    raw: bytes = b""
    mistakes: list[str] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    usual: Fault = field(default_factory=Fault)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._receive)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """What OTEL_EXPORTER_OTLP_ENDPOINT, or LANGFUSE_BASE_URL, wants."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[Got]:
        """Every span that was taken, as often as it was."""
        return [span for request in self.requests for span in request]

    @property
    def traces(self) -> dict[str, dict[str, Got]]:
        """What it shows: by trace and id. One that came again must be the same."""
        shown: dict[str, dict[str, Got]] = {}
        for span in self.spans:
            assert shown.setdefault(span.trace, {}).setdefault(span.id, span) == span
        return shown

    @property
    def threads(self) -> set[str]:
        return {span.said["claim_flow.thread"] for span in self.spans}

    async def was_asked(self) -> bool:
        return self.asked > 0

    async def _receive(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.asked += 1
        if any(request.headers.get(name) != value for name, value in self.wants.items()):
            return web.json_response({"message": "who are you?"}, status=401)
        try:
            assert (request.method, request.path) == ("POST", self.path)
            assert request.content_type == "application/json"
            got = list(_spans_in(json.loads(raw)))
        except Exception as exc:  # noqa: BLE001 (the test wants to see it, whatever it is)
            self.mistakes.append(f"{request.method} {request.path}: {type(exc).__name__}: {exc}")
            return web.json_response({"code": 3, "message": "no OTLP"}, status=400)
        fault = self.faults.popleft() if self.faults else self.usual
        if fault.held:
            await fault.held.wait()
        if any(span.name == self.poison for span in got):
            return web.json_response({"code": 3, "message": "I do not like this span"}, status=self.poisoned)
        if 200 <= fault.status < 300:
            self.raw += raw
            self.sizes.append(len(raw))
            self.requests.append(got)
        if fault.lost:
            return cut(request)
        return web.Response(status=fault.status, headers=fault.headers, text=fault.body, content_type=fault.kind)


def _spans_in(given: dict[str, Any]) -> Iterator[Got]:
    """The spans of a request. Fails for whatever the schema does not know, and for values that mean nothing."""
    # In JSON ids are hexadecimal, unlike other bytes: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
    plain = json.loads(json.dumps(given), object_hook=_with_bytes)
    request = json_format.ParseDict(plain, ExportTraceServiceRequest())
    for about in request.resource_spans:
        resource = _said(about.resource.attributes)
        assert resource["service.name"]
        for scope in about.scope_spans:
            assert scope.scope.name == "claim-flow"
            for span in scope.spans:
                assert (len(span.trace_id), len(span.span_id)) == (16, 8)
                assert any(span.trace_id) and any(span.span_id)
                assert len(span.parent_span_id) in (0, 8) and span.parent_span_id != span.span_id
                assert span.name and span.kind in (_INTERNAL, _CLIENT)
                # Of these days, and in nanoseconds.
                assert 1_700_000_000 * 10**9 < span.start_time_unix_nano <= span.end_time_unix_nano
                assert span.end_time_unix_nano < (time.time() + 60) * 10**9
                assert span.status.code in (0, 2) and (span.status.code == 2) == bool(span.status.message)
                yield Got(
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    above=span.parent_span_id.hex() or None,
                    name=span.name,
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    error=span.status.message or None,
                    said=_said(span.attributes),
                    about=resource,
                )


_DIGITS = {"traceId": 32, "spanId": 16, "parentSpanId": 16}


def _with_bytes(given: dict[str, Any]) -> dict[str, Any]:
    for name, digits in _DIGITS.items():
        if name in given:
            assert re.fullmatch(rf"[0-9a-f]{{{digits}}}", given[name]), given[name]
            given[name] = base64.b64encode(bytes.fromhex(given[name])).decode()
    for name in ("startTimeUnixNano", "endTimeUnixNano", "intValue"):
        assert isinstance(given.get(name, ""), str)
    return given


def _said(attributes: Any) -> dict[str, Any]:
    said = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
    assert len(said) == len(attributes) and all(said)
    return said
