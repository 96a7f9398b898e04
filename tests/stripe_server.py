"""Stripes to pay with: npm's `emulate`, for the shapes, and one of ours with the memory that the real one has.

`emulate` knows no idempotency keys: each request is a new payment there. `Stripe` stands in the test's own event loop,
keeps keys as https://docs.stripe.com/api/idempotent_requests says, and fails on demand.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from urllib.parse import parse_qsl

from aiohttp import web

from tests import node
from tests.bank import cut

API_KEY = "sk_test_4eC39HqLyjW"
CUSTOMER, CARD = "cus_ACME", "pm_card_visa"

_EMULATE = """
import net from "node:net";
import { createEmulator } from "%s";
const listen = net.Server.prototype.listen;
// It listens on every interface otherwise, and says so before it does.
net.Server.prototype.listen = function () {
  this.once("listening", () => console.log(`listening on http://127.0.0.1:${this.address().port}\n`));
  return listen.call(this, 0, "127.0.0.1");
};
await createEmulator({ service: "stripe" });
"""


@contextlib.contextmanager
def running_emulate() -> Iterator[str]:
    """The URL of a new emulated Stripe."""
    program = _EMULATE % (node.installed("stripe") / "emulate" / "dist" / "api.js")
    with node.running("start.mjs", files={"start.mjs": program}, environment={}) as url:
        yield url


# lost: it is done, and the answer never arrives. dropped: the request never arrives. A word: the status that the
# payment gets when it is confirmed. declined: by the bank. A number: that HTTP status, and nothing is done.
Fault = Literal["lost", "dropped", "declined", "processing", "requires_action"] | int
Step = Literal["create", "confirm", "retrieve", "cancel"]


@dataclass
class Stripe:
    """`async with Stripe() as stripe`: PaymentIntents at `stripe.url`.

    `moved` are the payments that were really made. `faults` are the next ones of each step.
    """

    moved: list[dict[str, str]] = field(default_factory=list)
    faults: defaultdict[Step, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    intents: dict[str, dict[str, Any]] = field(default_factory=dict)
    url: str = ""
    # What was asked and answered under each key.
    _kept: dict[str, tuple[dict[str, str], int, dict[str, Any]]] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/payment_intents", self._create)
        app.router.add_get("/v1/payment_intents/{id}", self._retrieve)
        app.router.add_post("/v1/payment_intents/{id}/confirm", self._confirm)
        app.router.add_post("/v1/payment_intents/{id}/cancel", self._cancel)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _create(self, request: web.Request) -> web.Response:
        return await self._answer(request, "create")

    async def _confirm(self, request: web.Request) -> web.Response:
        return await self._answer(request, "confirm")

    async def _cancel(self, request: web.Request) -> web.Response:
        return await self._answer(request, "cancel")

    async def _retrieve(self, request: web.Request) -> web.Response:
        if self.faults["retrieve"]:
            return web.json_response(
                _error("api_error", "told to refuse"), status=int(self.faults["retrieve"].popleft())
            )
        return web.json_response(self.intents[request.match_info["id"]])

    async def _answer(self, request: web.Request, step: Step) -> web.Response:
        """What this step answers: once for each key, and the same again whenever it is repeated."""
        if request.headers["Authorization"] != f"Bearer {API_KEY}":
            return web.json_response(_error("invalid_request_error", "Invalid API Key provided"), status=401)
        fault = self.faults[step].popleft() if self.faults[step] else None
        if fault == "dropped":
            return cut(request)
        if isinstance(fault, int):
            return web.json_response(_error("api_error", f"told to answer {fault}"), status=fault)
        key, asked = request.headers["Idempotency-Key"], dict(parse_qsl(await request.text()))
        asked["path"] = request.path
        known = self._kept.get(key)
        if known and known[0] != asked:
            error = _error("idempotency_error", "Keys can only be used with the same parameters")
            return web.json_response(error, status=400)
        if not known:
            known = self._kept[key] = (asked, *self._do(step, asked, request.match_info.get("id", ""), fault))
        if fault == "lost":
            return cut(request)
        return web.json_response(known[2], status=known[1])

    def _do(self, step: Step, asked: dict[str, str], intent_id: str, fault: object) -> tuple[int, dict[str, Any]]:
        if step == "create":
            intent_id = f"pi_{len(self.intents) + 1}"
            metadata = {name: asked[f"metadata[{name}]"] for name in ("thread", "key")}
            self.intents[intent_id] = {
                "id": intent_id,
                "object": "payment_intent",
                "status": "requires_confirmation",
                "metadata": metadata,
                "asked": asked,
            }
            return 200, dict(self.intents[intent_id])
        intent = self.intents[intent_id]
        if step == "cancel" and intent["status"] in ("succeeded", "canceled"):
            return 400, _unexpected(intent)
        if step == "cancel":
            intent["status"] = "canceled"
        elif intent["status"] != "requires_confirmation":
            return 400, _unexpected(intent)
        elif fault == "declined":
            intent["status"] = "requires_payment_method"
            return 402, _error("card_error", "Your card was declined.")
        else:
            intent["status"] = fault if fault in ("processing", "requires_action") else "succeeded"
            if intent["status"] == "succeeded":
                self.moved.append(intent["asked"])
        return 200, dict(intent)


def _unexpected(intent: dict[str, Any]) -> dict[str, Any]:
    error = _error("invalid_request_error", f"This PaymentIntent's status is {intent['status']}")
    error["error"]["code"] = "payment_intent_unexpected_state"
    return error


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}
