"""Every door, and everybody who may not decide: one table. What a person was shown while they might is sent later.

Whoever asks for another amount decides as well, so each door's way to that is in the table, as a door of its own. So
are each door's own ways to be nobody (a used link, a revoked token, a session that has ended, another's signature).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, LiteralString

import pytest
from aiohttp import web

from bot.pool import pool_of
from bot.site import Site
from bot.slack import Background, build_bolt, slack_events
from bot.web import build_web
from flow import links
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.delegations import end
from flow.inputs import mail_person
from flow.policy import Tier
from flow.sessions import end_session
from flow.tokens import revoke_token
from tests.api_door import OTHER_SECRET, SECRET, Program, api_in_process, signed, token
from tests.browsing import Visitor, pages_in_process, signed_in_at_once
from tests.local_slack import SIGNING_SECRET
from tests.people import ALICE, ANN, NO, ask, slack_person, stand_in
from tests.rows import RENEW_FINGERPRINTS, all_rows, value
from tests.slack_door import Caller, OurTeam, client_of, errors_in, typed_in

# How each door's own person is written in a list of approvers.
NAMES = {
    "slack": "U05DANA",
    "webhook": "webhook:acme:carol",
    "api": "api:robot",
    "inbox": "U05DANA",
    "link": "dana@example.com",
    "amount in Slack": "U05DANA",
    "amount by webhook": "webhook:acme:carol",
    "amount by API": "api:robot",
    "amount in the inbox": "U05DANA",
}
# What the audit log calls the door of each, and what has become of the request then.
DOORS = {"inbox": "web", "amount in Slack": "slack", "amount by webhook": "webhook", "amount by API": "api"} | {
    "amount in the inbox": "web"
}
DANA, DANA_BY_MAIL = slack_person("U05DANA", "Dana"), mail_person("dana@example.com")

# Sends the decision that was prepared; the HTTP status.
Send = Callable[[], Awaitable[int]]


@dataclass(frozen=True, kw_only=True)
class Doors:
    """All of them, on one database; whoever is behind each has been shown the request."""

    conn: Connection
    site: Site
    caller: Caller
    program: Program
    visitor: Visitor

    async def prepare(self, door: str, interrupt_id: str, **how: Any) -> Send:
        """What this door's own person would send."""
        send: Send = await getattr(self, door.lower().replace(" ", "_"))(interrupt_id, **how)
        return send

    async def nothing_done(self) -> bool:
        """Whether every request is as it was asked."""
        return not await all_rows(self.conn, "SELECT 1 FROM decisions") and not await all_rows(
            self.conn, "SELECT 1 FROM approvals WHERE status <> 'pending'"
        )

    async def slack(self, interrupt_id: str, **_: Any) -> Send:
        body = await self.caller.body_of(self.conn, interrupt_id, by="U05DANA")

        async def send() -> int:
            answered = await self.caller.click(body)
            # A click that was refused is answered like any other; its note says so in private.
            return 403 if answered.status == 200 and await self.nothing_done() else answered.status

        return send

    async def amount_in_slack(self, interrupt_id: str, **_: Any) -> Send:
        values = typed_in(amount="200", reason="")
        form = await self.caller.form_of(self.conn, interrupt_id, values, by="U05DANA", callback_id="change-amount")

        async def send() -> int:
            answered = await self.caller.click(form)
            return 403 if errors_in(answered) else answered.status

        return send

    async def amount_by_webhook(self, interrupt_id: str, *, secret: str = SECRET, **_: Any) -> Send:
        raw = json.dumps({"amount": "200", "approver": "carol"}).encode()

        async def send() -> int:
            path = f"/api/approvals/{interrupt_id}/amount"
            return (await self.program.ask("POST", path, raw=raw, headers=signed(raw, secret=secret))).status

        return send

    async def amount_by_api(self, interrupt_id: str, **_: Any) -> Send:
        return await self.api(interrupt_id, path="amount", said={"amount": "200"})

    async def amount_in_the_inbox(self, interrupt_id: str, **_: Any) -> Send:
        return await self.inbox(interrupt_id, button="Ask anew", amount="200")

    async def webhook(self, interrupt_id: str, *, secret: str = SECRET, **_: Any) -> Send:
        said = {"decision": "approve", "approver": "carol"}

        async def send() -> int:
            return (await self.program.decide_signed(interrupt_id, said, secret=secret)).status

        return send

    async def api(self, interrupt_id: str, *, path: str = "decision", said: Any = None, **_: Any) -> Send:
        secret = await token(self.conn, scopes=("decide",))

        async def send() -> int:
            answered = await self.program.post(
                f"/api/approvals/{interrupt_id}/{path}",
                said or {"decision": "approve"},
                headers={"Authorization": f"Bearer {secret}"},
            )
            return answered.status

        return send

    async def inbox(self, interrupt_id: str, *, button: str = "Approve", **typed: str) -> Send:
        await signed_in_at_once(self.conn, self.site, self.visitor, DANA)
        page = await self.visitor.get(f"/approvals/{interrupt_id}")

        async def send() -> int:
            status = (await self.visitor.press(page, button, **typed)).status
            # 303 leads on: to the request after a decision, to the sign-in page without a session.
            return 401 if status == 303 and await self.nothing_done() else status

        return send

    async def link(self, interrupt_id: str, **_: Any) -> Send:
        made = await links.make_link(
            self.conn, await approval_of(self.conn, interrupt_id), DANA_BY_MAIL, by="cli:ann", with_code=False
        )
        page = await self.visitor.get(f"/a/{made.token}")
        fields = page.form("Approve").fields | {"verdict": "approve"}

        async def send() -> int:
            return (await self.visitor.post(f"/a/{made.token}", fields)).status

        return send


@pytest.fixture
async def doors(database_url: str, conn: Connection) -> AsyncIterator[Doors]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        site = await enter(pages_in_process(database_url, groups=OurTeam()))  # type: ignore[arg-type]
        yield Doors(
            conn=conn,
            site=site,
            caller=await enter(Caller(await enter(slack_door(database_url)))),
            program=await enter(Program(await enter(api_in_process(database_url)))),
            visitor=await enter(Visitor(site.url)),
        )


@asynccontextmanager
async def slack_door(database_url: str) -> AsyncIterator[str]:
    """The bot's door for Slack's requests."""
    background = Background()
    async with pool_of(database_url) as pool, client_of("http://127.0.0.1:9/api/") as client:
        bolt = build_bolt(client, pool, OurTeam(), background)  # type: ignore[arg-type]
        runner = web.AppRunner(build_web(slack=slack_events(bolt, SIGNING_SECRET), checks={}), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            await background.drain(10.0)


# What may have happened since the person was shown the request, as SQL with their name; and who that makes them.
SINCE: dict[str, LiteralString] = {
    "a stranger": "UPDATE approvals SET approvers = '{U99NOBODY}' WHERE %(name)s <> ''",
    "an approver of another tier": "UPDATE approvals SET approvers = '{U99NOBODY}' WHERE %(name)s <> '' AND"
    " thread_id = 't1'",
    "the requester": "UPDATE approvals SET requested_by = %(name)s",
    "too late": "UPDATE approvals SET expires_at = clock_timestamp() WHERE %(name)s <> ''",
    "shown another request": "UPDATE approvals SET request_hash = repeat('0', 64) WHERE %(name)s <> ''",
}
# These two name the row and show nothing that could be another: an approval's request never changes.
SHOWS_NOTHING = [(door, "shown another request") for door in ("webhook", "api", "amount by webhook", "amount by API")]


@pytest.mark.parametrize("door", NAMES)
async def test_whoever_may_decide_does(doors: Doors, conn: Connection, door: str) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=(NAMES[door],)))
    send = await doors.prepare(door, interrupt_id)
    assert await send() in (200, 303)
    approval = await approval_of(conn, interrupt_id)
    assert approval.status == ("superseded" if door.startswith("amount") else "approved")
    recorded = await value(conn, "SELECT door FROM audit WHERE kind IN ('approval.changed', 'approval.decided')")
    assert recorded == DOORS.get(door, door)


@pytest.mark.parametrize(
    ("door", "who"), [(door, who) for door in NAMES for who in SINCE if (door, who) not in SHOWS_NOTHING]
)
async def test_whoever_may_not_decide_does_not(doors: Doors, conn: Connection, door: str, who: str) -> None:
    tier = Tier(name="approval", approvers=(NAMES[door],))
    interrupt_id = await ask(conn, tier=tier)
    await ask(conn, "t2", tier=tier)
    send = await doors.prepare(door, interrupt_id)
    await conn.execute(SINCE[who], {"name": NAMES[door]})
    await conn.execute(RENEW_FINGERPRINTS)
    assert 400 <= await send() < 500
    assert await doors.nothing_done()
    assert await value(conn, "SELECT count(*) FROM threads WHERE wakes > 0") == 0


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("door", NAMES)
async def test_whoever_decides_for_somebody_does_until_that_is_ended(
    doors: Doors, conn: Connection, door: str, *, ended: bool
) -> None:
    """No door asks whether whoever lent their voice is still in the team."""
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=("U01ALICE",)))
    await stand_in(conn, ALICE, NAMES[door])
    send = await doors.prepare(door, interrupt_id)
    if ended:
        assert await end(conn, ALICE, by="cli:ann")
    status = await send()
    assert (400 <= status < 500) if ended else status in (200, 303)
    assert await doors.nothing_done() == ended


@pytest.mark.parametrize("door", NAMES)
async def test_what_was_settled_the_other_way_stays(doors: Doors, conn: Connection, door: str) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=(NAMES[door],)))
    send = await doors.prepare(door, interrupt_id)
    await decide(conn, interrupt_id, ANN, NO)
    await send()
    assert await value(conn, "SELECT array_agg(person) FROM decisions") == [ANN.key]
    assert (await approval_of(conn, interrupt_id)).status == "rejected"


async def another_senders_secret(doors: Doors, door: str, interrupt_id: str) -> Send:
    return await doors.prepare(door, interrupt_id, secret=OTHER_SECRET)


async def a_revoked_token(doors: Doors, door: str, interrupt_id: str) -> Send:
    send = await doors.prepare(door, interrupt_id)
    await revoke_token(doors.conn, "robot", by="cli:ann")
    return send


async def a_session_that_was_ended(doors: Doors, door: str, interrupt_id: str) -> Send:
    send = await doors.prepare(door, interrupt_id)
    cookie = doors.visitor.cookies[doors.site.cookie_name("session")]
    secret = doors.site.unsigned(cookie, use="session")
    assert secret is not None
    await end_session(doors.conn, secret)
    return send


async def a_revoked_link(doors: Doors, door: str, interrupt_id: str) -> Send:
    send = await doors.prepare(door, interrupt_id)
    await doors.conn.execute("UPDATE links SET revoked_at = clock_timestamp() WHERE used_at IS NULL")
    return send


async def a_used_link(doors: Doors, door: str, interrupt_id: str) -> Send:
    send = await doors.prepare(door, interrupt_id)
    await doors.conn.execute("UPDATE links SET used_at = clock_timestamp() WHERE revoked_at IS NULL")
    return send


@pytest.mark.parametrize(
    ("door", "come_as"),
    [
        ("webhook", another_senders_secret),
        ("api", a_revoked_token),
        ("inbox", a_session_that_was_ended),
        ("link", a_revoked_link),
        ("link", a_used_link),
        ("amount by webhook", another_senders_secret),
        ("amount by API", a_revoked_token),
        ("amount in the inbox", a_session_that_was_ended),
    ],
)
async def test_whoever_is_nobody_any_more_does_not_decide(
    doors: Doors, conn: Connection, door: str, come_as: Callable[[Doors, str, str], Awaitable[Send]]
) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=(NAMES[door],)))
    send = await come_as(doors, door, interrupt_id)
    assert 400 <= await send() < 500
    assert await doors.nothing_done()
