"""The API's description, made from its table of routes and the models that validate: https://spec.openapis.org/oas/v3.1.1"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from bot import shapes
from bot.api import Route

_REF = "#/components/schemas/{model}"
_PATH_PARAMETERS: dict[str, Any] = {"thread": shapes.ThreadId, "interrupt_id": shapes.InterruptId}

_REFUSALS = {
    400: "Malformed.",
    401: "Not authenticated.",
    403: "Not allowed.",
    404: "Unknown.",
    405: "Not this method.",
    409: "Decided otherwise, used otherwise, or still being worked on.",
    410: "Expired, or forgotten.",
    413: "Too large.",
    415: "Not JSON.",
    422: "Well formed, and not usable: an amount with too many decimals, a key that came with another request.",
    429: "Too many requests.",
    503: "It could not be recorded: ask again, twice is once.",
}
# Of every operation.
_ALWAYS = (400, 401, 403, 429, 503)


def describe(routes: Sequence[Route], *, version: str) -> dict[str, Any]:
    """The document, as JSON."""
    schemas = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(f"/api{route.path}", {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "claim-flow",
            "version": version,
            "description": "Claims that wait for a person and are paid exactly once. Whatever may be repeated is safe"
            " to repeat: starting a thread, deciding, a signed request under its id.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["components"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "`claim_flow.py tokens create`"},
                "signature": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "webhook-signature",
                    "description": "https://www.standardwebhooks.com, with webhook-id and webhook-timestamp",
                },
            },
        },
    }


def _schemas(routes: Sequence[Route]) -> dict[str, Any]:
    """Every model's schema: `of` it as a reference, and all `components`."""
    wanted: list[tuple[type[BaseModel], Any]] = [(shapes.Problem, "serialization")]
    for route in routes:
        wanted.append((route.answer, "serialization"))
        wanted.append((route.query, "validation"))
        if route.body:
            wanted.append((route.body, "validation"))
    of, definitions = models_json_schema(wanted, ref_template=_REF)
    return {"of": of, "components": definitions["$defs"]}


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": _pattern(name)}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    query = schemas["components"][route.query.__name__]
    for name, schema in query.get("properties", {}).items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": _not_null(schema)})
    if route.name == "startThread":
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "The same key with the same body gets the first answer again.",
                "schema": {"type": "string", "pattern": r"^[!-~]{1,200}$"},
            }
        )
        parameters.append(
            {
                "name": "traceparent",
                "in": "header",
                "required": False,
                "description": "The caller's trace context (W3C), which the thread's trace goes on.",
                "schema": {"type": "string"},
            }
        )
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"A token needs the scope `{route.scope}`.",
        "parameters": parameters,
        "security": [{"token": []}, *([{"signature": []}] if route.signed else [])],
        "responses": _responses(route, schemas),
    }
    if route.body:
        content = {"application/json": {"schema": schemas["of"][route.body, "validation"]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    known = {"X-Request-Id": {"schema": {"type": "string"}, "description": "As the log has it."}}
    answer = {"application/json": {"schema": schemas["of"][route.answer, "serialization"]}}
    problem = {"application/problem+json": {"schema": schemas["of"][shapes.Problem, "serialization"]}}
    done = {200: "Done.", 201: "Started."}
    responses = {
        str(status): {"description": done[status], "headers": known, "content": answer} for status in route.success
    }
    for status in sorted({*_ALWAYS, *route.refusals}):
        responses[str(status)] = {"description": _REFUSALS[status], "headers": known, "content": problem}
    return responses


def _pattern(name: str) -> str:
    return str(TypeAdapter(_PATH_PARAMETERS[name]).json_schema()["pattern"])


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter is there or not; it is never null."""
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    if not options:
        return {name: value for name, value in schema.items() if name != "title"}
    kept = {name: value for name, value in schema.items() if name not in ("anyOf", "default", "title")}
    return {**options[0], **kept}


def as_page(description: dict[str, Any]) -> str:
    """The same for people: one page of HTML that needs nothing else."""
    return _environment().from_string(_PAGE).render(description=description, paths=description["paths"])


def _environment() -> Environment:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    return environment


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>claim-flow: the API</title>
<style>
  :root { color-scheme: light dark }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
  h2 { margin-top: 2.5rem; font-size: 1.1rem }
  code, pre { font: 14px/1.5 ui-monospace, monospace }
  pre { overflow-x: auto; padding: .75rem; border: 1px solid color-mix(in srgb, currentColor 25%, transparent) }
  td, th { text-align: left; vertical-align: top; padding: .1rem 1rem .1rem 0 }
</style>
<h1>claim-flow: the API</h1>
<p>{{ description.info.description }} The same for programs: <a href="/openapi.json">openapi.json</a>.</p>
<p>Every request needs <code>Authorization: Bearer cf_…</code> (<code>claim_flow.py tokens create</code>), or, where it
says so, a signature per <a href="https://www.standardwebhooks.com" rel="noreferrer">Standard Webhooks</a>.</p>
{% for path, operations in paths.items() %}
{% for method, operation in operations.items() %}
<h2 id="{{ operation.operationId }}"><code>{{ method.upper() }} {{ path }}</code></h2>
<p>{{ operation.summary }} {{ operation.description }}
{% if operation.security|length > 1 %}Or signed.{% endif %}</p>
{% if operation.parameters %}
<table>
{% for parameter in operation.parameters %}
<tr><th><code>{{ parameter.name }}</code><td>{{ parameter.in }}{{ ", required" if parameter.required }}<td>
<code>{{ parameter.schema.pattern or parameter.schema.enum|join(" ") or parameter.schema.type }}</code>
<td>{{ parameter.schema.description or parameter.description }}
{% endfor %}
</table>
{% endif %}
{% if operation.requestBody %}
<p>Body: <a href="#{{ operation.requestBody.content["application/json"].schema["$ref"].split("/")|last }}">
{{ operation.requestBody.content["application/json"].schema["$ref"].split("/")|last }}</a></p>
{% endif %}
<table>
{% for status, answer in operation.responses.items() %}
<tr><th>{{ status }}<td>{{ answer.description }}
{% endfor %}
</table>
{% endfor %}
{% endfor %}
<h1>Shapes</h1>
{% for name, schema in description.components.schemas.items() %}
<h2 id="{{ name }}">{{ name }}</h2>
<pre>{{ schema|pretty }}</pre>
{% endfor %}
</html>
"""
