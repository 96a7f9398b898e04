"""A Slack that people sign in with: OpenID Connect, as far as we speak it, and able to misbehave."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

CLIENT_ID, CLIENT_SECRET = "1234567890.42", "client-secret"


@dataclass
class OpenIdServer:
    """`claims` are laid over the good ones of each token, None takes one away; `key` signs it."""

    url: str = ""
    key: Any = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "one"}))
    published: Any = None
    algorithm: str = "RS256"
    header: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    # What the token endpoint answers in the place of a token.
    answer: tuple[int, Any] | None = None
    authorized: list[dict[str, str]] = field(default_factory=list)
    redeemed: list[dict[str, str]] = field(default_factory=list)

    async def authorize(self, request: web.Request) -> web.Response:
        """The person agrees at once."""
        asked = dict(request.query)
        self.authorized.append(asked)
        query = urlencode({"code": f"code-{len(self.authorized)}", "state": asked["state"]})
        raise web.HTTPFound(f"{asked['redirect_uri']}?{query}")

    async def token(self, request: web.Request) -> web.Response:
        fields = {name: str(value) for name, value in (await request.post()).items()}
        self.redeemed.append(fields)
        if self.answer is not None:
            status, body = self.answer
            return web.json_response(body, status=status)
        number = fields["code"].removeprefix("code-")
        known = number.isdigit() and 0 < int(number) <= len(self.authorized)
        if not known or (fields["client_id"], fields["client_secret"]) != (CLIENT_ID, CLIENT_SECRET):
            return web.json_response({"ok": False, "error": "invalid_code"})
        asked = self.authorized[int(number) - 1]
        if asked["redirect_uri"] != fields["redirect_uri"]:
            return web.json_response({"ok": False, "error": "bad_redirect_uri"})
        return web.json_response({"ok": True, "id_token": self.signed(asked["nonce"])})

    def signed(self, nonce: str) -> str:
        now = int(time.time())
        good = {
            "iss": self.url,
            "aud": CLIENT_ID,
            "sub": "U01ALICE",
            "iat": now,
            "exp": now + 300,
            "nonce": nonce,
            "name": "Alice",
            "https://slack.com/user_id": "U01ALICE",
            "https://slack.com/team_id": "T01TEST",
        }
        claims = {name: value for name, value in (good | self.claims).items() if value is not None}
        header = {"alg": self.algorithm, "kid": "one"} | self.header
        if self.algorithm == "HS256":
            return _signed_with_the_public_key(self.key, header, claims)
        return jwt.encode(header, claims, self.key, algorithms=[self.algorithm])

    async def keys(self, _: web.Request) -> web.Response:
        return web.json_response(KeySet([self.published or self.key]).as_dict(private=False))


@contextlib.asynccontextmanager
async def openid_server() -> AsyncIterator[OpenIdServer]:
    server = OpenIdServer()
    app = web.Application()
    app.router.add_get("/openid/connect/authorize", server.authorize)
    app.router.add_post("/api/openid.connect.token", server.token)
    app.router.add_get("/openid/connect/keys", server.keys)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def another_key() -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": "one"})


def _signed_with_the_public_key(key: RSAKey, header: dict[str, Any], claims: dict[str, Any]) -> str:
    """What a verifier that lets the token choose the algorithm would take. By hand: no library makes one."""
    text = ".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
    mac = hmac.new(key.as_pem(private=False), text.encode(), hashlib.sha256).digest()
    return f"{text}.{_base64(mac)}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
