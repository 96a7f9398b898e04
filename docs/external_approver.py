"""An external approver: it says yes to claims of up to 500 USD, and leaves the others to people.

It is told of claims by signed webhooks, and decides with signed requests: see "Webhooks" in the README.
"""

import json
import os
from datetime import UTC, datetime
from decimal import Decimal

from aiohttp import ClientSession, web
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

EVENTS, DECISIONS = Webhook(os.environ["EVENTS_SECRET"]), Webhook(os.environ["DECISIONS_SECRET"])


async def receive(request: web.Request) -> web.Response:
    try:
        event = EVENTS.verify(await request.read(), dict(request.headers))
    except (WebhookVerificationError, ValueError):
        return web.Response(status=401)
    claim = event["data"]
    if event["type"] == "approval.requested" and claim["currency"] == "USD" and Decimal(claim["amount"]) <= 500:
        # If that fails, so does this: the event comes again, and the decision under the same id. Twice is once.
        await approve(claim["interrupt_id"], claim["request_hash"])
    return web.Response(status=204)


async def approve(interrupt_id: str, request_hash: str) -> None:
    # The signature covers the body alone: it says what is decided.
    what = {"interrupt_id": interrupt_id, "request_hash": request_hash}
    body = json.dumps({"decision": "approve", "approver": "carol", "reason": "up to 500 USD"} | what)
    sent_id, now = f"approve_{interrupt_id}", datetime.now(UTC)
    headers = {
        "content-type": "application/json",
        "webhook-id": sent_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": DECISIONS.sign(sent_id, now, body),
    }
    url = f"{os.environ['CLAIM_FLOW_URL']}/api/approvals/{interrupt_id}/decision"
    async with ClientSession() as http, http.post(url, data=body, headers=headers) as answer:
        # 409 and 410: somebody was faster, or it was too late.
        if answer.status not in (200, 409, 410):
            raise web.HTTPBadGateway(text=await answer.text())


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/", receive)
    web.run_app(app, host="127.0.0.1", port=int(os.environ["PORT"]))
