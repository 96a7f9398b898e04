"""The aiohttp application: Slack's requests and the health of this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

# A block_actions payload carries the whole message; Slack's own limit is far below this.
_LARGEST_BODY = 1 << 20

Check = Callable[[], Awaitable[str | None]]


def build_web(
    *, slack: Callable[[web.Request], Awaitable[web.StreamResponse]] | None, checks: dict[str, Check]
) -> web.Application:
    """The application. Each check says what is wrong, or None; /readyz is 200 only if all say None."""
    app = web.Application(client_max_size=_LARGEST_BODY)

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def readyz(_: web.Request) -> web.Response:
        findings = {name: await check() for name, check in checks.items()}
        ready = not any(findings.values())
        body = {"ready": ready, "checks": {name: wrong or "ok" for name, wrong in findings.items()}}
        return web.json_response(body, status=200 if ready else 503)

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    if slack is not None:
        app.router.add_post("/slack/events", slack)
    return app
