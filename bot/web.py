"""The aiohttp application: Slack's requests, the API with its description, pages, and this process's health."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import version

from aiohttp import web

# A block_actions payload carries the whole message; Slack's own limit is far below this.
_LARGEST_BODY = 1 << 20

Check = Callable[[], Awaitable[str | None]]


def build_web(
    *,
    slack: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None,
    api: web.Application | None = None,
    pages: Iterable[web.RouteDef] = (),
    metrics: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None,
    checks: dict[str, Check],
) -> web.Application:
    """The application. Each check says what is wrong, or None; /readyz is 200 only if all say None."""
    app = web.Application(client_max_size=_LARGEST_BODY)
    logging.getLogger("aiohttp.server").addFilter(_is_no_strangers_body)

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def readyz(_: web.Request) -> web.Response:
        findings = {name: await check() for name, check in checks.items()}
        ready = not any(findings.values())
        body = {"ready": ready, "checks": {name: wrong or "ok" for name, wrong in findings.items()}}
        return web.json_response(body, status=200 if ready else 503)

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    if metrics is not None:
        app.router.add_get("/metrics", metrics)
    if slack is not None:
        app.router.add_post("/slack/events", slack)
    if api is not None:
        app.add_subapp("/api", api)
        _add_description(app)
    app.add_routes(pages)
    return app


def _is_no_strangers_body(record: logging.LogRecord) -> bool:
    """A body that cannot be read was answered; aiohttp, which reads what is left of it, would log that as a failure."""
    return not (record.exc_info and isinstance(record.exc_info[1], web.RequestPayloadError))


def _add_description(app: web.Application) -> None:
    """The API's description, for programs and, on a page that loads nothing from elsewhere, for people."""
    from bot.api import ROUTES
    from bot.openapi import as_page, describe

    description = describe(ROUTES, version=version("claim-flow"))
    page = as_page(description)

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response(description)

    async def docs(_: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return web.Response(text=page, content_type="text/html", headers=headers)

    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/docs", docs)
