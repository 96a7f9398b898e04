"""Spans as OTLP has them, in JSON: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.

Pure functions, and where the settings say that traces go. Langfuse takes OTLP, too; what it wants to be told besides is
in its own attributes: https://langfuse.com/integrations/native/opentelemetry.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

from flow.settings import Settings
from flow.spans import Span
from flow.trace import Tree

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS = {"internal": 1, "client": 3}
_STATUS_ERROR = 2


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where traces go. `headers` hold its key. `marks_models`: it wants to be told which spans are calls of a model."""

    name: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    marks_models: bool = False


def targets_of(settings: Settings) -> tuple[Target, ...]:
    """The targets of `settings.trace_targets`."""
    targets: list[Target] = []
    if not settings.trace_targets:
        return ()
    if settings.otlp_url:
        targets.append(Target(name="otlp", url=settings.otlp_url, headers=settings.otlp_headers))
    if settings.langfuse_url and settings.langfuse_secret_key:
        keys = f"{settings.langfuse_public_key}:{settings.langfuse_secret_key.get_secret_value()}"
        headers = {
            "Authorization": f"Basic {base64.b64encode(keys.encode()).decode()}",
            # Else what arrives is shown after ten minutes.
            "x-langfuse-ingestion-version": "4",
        }
        targets.append(Target(name="langfuse", url=settings.langfuse_url, headers=headers, marks_models=True))
    return tuple(targets)


def span_as_json(span: Span, tree: Tree, target: Target, hide: Callable[[str], str]) -> dict[str, Any]:
    """One span of the tree that has ended. `hide` takes secrets out of texts."""
    assert span.ended_at is not None
    said = span.attributes | {"claim_flow.thread": tree.thread_id}
    if target.marks_models:
        # It looks for these at each span, whichever comes first.
        said |= {"langfuse.trace.name": tree.root.span.name, "langfuse.trace.metadata.thread": tree.thread_id}
        if "gen_ai.request.model" in said:
            said["langfuse.observation.type"] = "generation"
            # Only there with TRACE_CONTENT.
            said |= {
                f"langfuse.observation.{way}": said.pop(name)
                for way in ("input", "output")
                if (name := f"gen_ai.{way}.messages") in said
            }
    made: dict[str, Any] = {
        "traceId": tree.trace_id,
        "spanId": span.span_id,
        "name": hide(span.name),
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": _nanoseconds(span.started_at),
        "endTimeUnixNano": _nanoseconds(span.ended_at),
        "attributes": attributes(said, hide),
    }
    if span.parent_id:
        made["parentSpanId"] = span.parent_id
    if span.error:
        made["status"] = {"code": _STATUS_ERROR, "message": hide(span.error)}
    return made


def body_of(spans: Sequence[str], resource: Mapping[str, str]) -> bytes:
    """A request with these spans, each as JSON by now; one without any is valid, and asks whether we may send."""
    about = json.dumps({"attributes": attributes({**resource, "service.version": version("claim-flow")}, str)})
    scope = json.dumps({"name": "claim-flow", "version": version("claim-flow")})
    scoped = f'{{"resource":{about},"scopeSpans":[{{"scope":{scope},"spans":[{",".join(spans)}]}}]}}' if spans else ""
    return f'{{"resourceSpans":[{scoped}]}}'.encode()


def attributes(said: Mapping[str, Any], hide: Callable[[str], str]) -> list[dict[str, Any]]:
    """Attributes in their order; without those that have no value."""
    return [{"key": name, "value": _value(value, hide)} for name, value in said.items() if value is not None]


def _value(value: Any, hide: Callable[[str], str]) -> dict[str, Any]:
    # First: it is an int, too.
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(each, hide) for each in value]}}
    return {"stringValue": hide(value if isinstance(value, str) else json.dumps(value))}


def _nanoseconds(at: datetime) -> str:
    return str((at - _EPOCH) // timedelta(microseconds=1) * 1000)
