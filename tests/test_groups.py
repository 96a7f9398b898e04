"""Who is somebody, and who is in a user group: asked of Slack at the click, and everything unclear is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs

import pytest

from bot import groups
from bot.groups import OwnTeam, check_groups
from bot.people import slack_person
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.delegations import away
from flow.errors import NotAllowed
from flow.policy import Tier
from tests.asking import put, tool_call
from tests.browsing import PageSeen, Visitor, pages_in_process, signed_in_at_once
from tests.fault_proxy import FaultKind, FaultProxy, UserGroup
from tests.local_slack import LocalSlack, skip_reason
from tests.people import ALICE, BOB, YES, ask
from tests.rows import all_rows, value
from tests.slack_door import Caller, bot_in_process, client_of
from tests.slack_requests import payload_body

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

# The proxy's own group, with Alice in it.
GROUP, GROUP_ID = "@finance-managers", "S0APPR"
UNSAID = f"Slack did not say who is in {GROUP}: click again in a moment."


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    with LocalSlack(request_url="http://127.0.0.1:9/") as slack:
        async with FaultProxy(slack.ui_url) as running:
            yield running


@pytest.fixture
async def bot(database_url: str, proxy: FaultProxy) -> AsyncIterator[Caller]:
    """A bot that runs in this process, and somebody in front of it."""
    async with client_of(proxy.api_url) as client, bot_in_process(database_url, client) as url, Caller(url) as caller:
        yield caller


def tier(*approvers: str, **rules: Any) -> Tier:
    return Tier(name="approval", approvers=approvers, **rules)


async def decided_by(conn: Connection) -> list[tuple[str, str]]:
    rows = await all_rows(conn, "SELECT person, listed_as FROM decisions ORDER BY decided_at")
    return [(row["person"], row["listed_as"]) for row in rows]


async def refusals(conn: Connection) -> list[tuple[str, str, str]]:
    """Of whom the audit log says that they were refused, through which door, and why."""
    rows = await all_rows(conn, "SELECT who, door, data->>'why' AS why FROM audit WHERE kind = 'approval.refused'")
    return [(row["who"], row["door"], row["why"]) for row in rows]


def without_team(click: bytes) -> bytes:
    """The same click where neither the person nor the place has a team."""
    payload = json.loads(parse_qs(click.decode())["payload"][0])
    return payload_body(payload | {"team": None, "user": {"id": payload["user"]["id"], "name": "alice"}})


async def refused(bot: Caller, conn: Connection, interrupt_id: str, **who: Any) -> str:
    """The note that the person gets; nothing was written."""
    return await refused_click(bot, conn, interrupt_id, await bot.body_of(conn, interrupt_id, **who))


async def refused_click(bot: Caller, conn: Connection, interrupt_id: str, click: bytes) -> str:
    assert (await bot.click(click)).status == 200
    note = await bot.note()
    assert await decided_by(conn) == []
    assert (await approval_of(conn, interrupt_id)).status == "pending"
    assert await value(conn, "SELECT count(*) FROM threads WHERE wakes > 0") == 0
    return note


# Who is in


@pytest.mark.parametrize("name", [GROUP, GROUP_ID])
async def test_whoever_is_in_a_listed_group_decides(
    bot: Caller, proxy: FaultProxy, conn: Connection, name: str
) -> None:
    interrupt_id = await ask(conn, tier=tier("U02BOB", name))
    assert (await bot.click(await bot.body_of(conn, interrupt_id))).status == 200
    assert await decided_by(conn) == [(ALICE.key, name)]
    assert (await approval_of(conn, interrupt_id)).status == "approved"
    [listed] = proxy.calls_of("usergroups.list")
    assert (listed["include_users"], [each["user"] for each in proxy.calls_of("users.info")]) == ("1", ["U01ALICE"])


async def test_whoever_is_listed_by_their_id_costs_slack_no_question(
    bot: Caller, proxy: FaultProxy, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=tier(GROUP, "U01ALICE"))
    assert (await bot.click(await bot.body_of(conn, interrupt_id))).status == 200
    assert await decided_by(conn) == [(ALICE.key, "U01ALICE")]
    assert {call.method for call in proxy.calls} == {"auth.test"}


async def test_whoever_is_not_in_the_group_is_refused(bot: Caller, proxy: FaultProxy, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=tier(GROUP))
    proxy.groups["S0OTHER"] = UserGroup(handle="others", users=["U02BOB"])
    note = await refused(bot, conn, interrupt_id, by="U02BOB")
    assert note == f"U02bob may not decide this: not on the list of approvers ({GROUP})."


@pytest.mark.parametrize("name", [GROUP, GROUP_ID, "@no-such-group"])
async def test_a_group_that_is_disabled_or_was_never_there_names_nobody(
    bot: Caller, proxy: FaultProxy, conn: Connection, name: str
) -> None:
    proxy.groups[GROUP_ID] = UserGroup(handle="finance-managers", users=["U01ALICE"], is_disabled=True)
    assert "not on the list" in await refused(bot, conn, await ask(conn, tier=tier(name)))


async def test_an_empty_list_means_nobody_whatever_group_somebody_is_in(
    bot: Caller, proxy: FaultProxy, conn: Connection
) -> None:
    assert "nobody is" in await refused(bot, conn, await ask(conn, tier=tier()))
    assert proxy.calls_of("usergroups.list") == []


# Whatever Slack's directory says of somebody who is no full member of ours; None takes the word away.
KINDS: list[dict[str, Any]] = [
    {"is_restricted": True},
    {"is_restricted": True, "is_ultra_restricted": True},
    {"is_bot": True},
    {"deleted": True},
    {"team_id": "T0OTHER", "is_stranger": True},
    {"is_stranger": True},
    {"team_id": "T0OTHER"},
    {"team_id": None},
    {"is_restricted": None},
    {"is_bot": "false"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_who_is_no_full_member_counts_for_no_group_and_decides_if_listed(
    bot: Caller, proxy: FaultProxy, conn: Connection, kind: dict[str, Any]
) -> None:
    proxy.members["U01ALICE"] = kind
    interrupt_id = await ask(conn, tier=tier(GROUP))
    assert "not on the list" in await refused(bot, conn, interrupt_id)
    assert len(proxy.calls_of("users.info")) == 1

    listed = await ask(conn, "t2", tier=tier(GROUP, "U01ALICE"))
    assert (await bot.click(await bot.body_of(conn, listed))).status == 200
    assert (await approval_of(conn, listed)).status == "approved"


async def test_a_member_of_our_grid_counts_and_of_another_does_not(
    bot: Caller, proxy: FaultProxy, conn: Connection
) -> None:
    proxy.members["U01ALICE"] = {
        "team_id": "T02NEAR",
        "enterprise_user": {"id": "U01ALICE", "enterprise_id": "E01GRID", "teams": ["T01TEST", "T02NEAR"]},
    }
    await bot.click(await bot.body_of(conn, await ask(conn, tier=tier(GROUP)), team="T02NEAR"))
    assert await decided_by(conn) == [("slack:T02NEAR/U01ALICE", GROUP)]


@pytest.mark.parametrize("name", ["U01ALICE", GROUP])
async def test_the_same_id_in_another_team_is_a_stranger(
    bot: Caller, proxy: FaultProxy, conn: Connection, name: str
) -> None:
    interrupt_id = await ask(conn, tier=tier(name))
    assert "not on the list" in await refused(bot, conn, interrupt_id, team="T0OTHER")
    # Wherever they click: in a shared channel the team of the payload is ours.
    elsewhere = {"id": "U01ALICE", "name": "alice", "team_id": "T0OTHER"}
    assert "not on the list" in await refused(bot, conn, interrupt_id, user=elsewhere)


GRID_NAME = "slack:E01GRID/U01ALICE"


@pytest.mark.parametrize("named_team", [True, False])
async def test_a_strangers_payload_with_our_grid_makes_them_nobody_of_it(
    bot: Caller, proxy: FaultProxy, conn: Connection, named_team: bool
) -> None:
    """In a channel that is shared with our grid the payload's enterprise is ours, whoever presses."""
    proxy.members["U01ALICE"] = {"team_id": "T99OUT"}
    interrupt_id = await ask(conn, tier=tier(GRID_NAME, "U01ALICE", GROUP))
    user = {"id": "U01ALICE", "name": "mallory", **({"team_id": "T99OUT"} if named_team else {})}
    click = await bot.body_of(conn, interrupt_id, user=user, enterprise={"id": "E01GRID", "name": "ours"})
    assert "not on the list" in await refused_click(bot, conn, interrupt_id, click)


@pytest.mark.parametrize("named_team", [True, False])
@pytest.mark.parametrize("name", [GRID_NAME, "U01ALICE"])
async def test_in_a_whole_grid_whoever_slacks_directory_has_there_is_of_it(
    database_url: str, proxy: FaultProxy, conn: Connection, name: str, named_team: bool
) -> None:
    proxy.members["U01ALICE"] = {
        "team_id": "T02NEAR",
        "enterprise_user": {"id": "U01ALICE", "enterprise_id": "E01GRID", "teams": ["T02NEAR"]},
    }
    interrupt_id = await ask(conn, tier=tier(name))
    async with client_of(proxy.api_url) as client:
        own_team = OwnTeam(client)
        own_team._keys = frozenset({"E01GRID"})
        stranger = slack_person(
            user_id="U01ALICE", name="Mallory", team_id="T99OUT", enterprise_id="E01GRID", own_team={"E01GRID"}
        )
        with pytest.raises(NotAllowed):
            await decide(conn, interrupt_id, await own_team.placed(stranger), YES)
        team_id = "T02NEAR" if named_team else ""
        came = slack_person(
            user_id="U01ALICE", name="Alice", team_id=team_id, enterprise_id="E01GRID", own_team={"E01GRID"}
        )
        decided = await decide(conn, interrupt_id, await own_team.placed(came), YES)
    assert [(each.person, each.listed_as) for each in decided.approval.decisions] == [("slack:T02NEAR/U01ALICE", name)]


async def test_a_member_of_our_own_team_is_of_its_grid_without_a_question(
    bot: Caller, proxy: FaultProxy, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=tier(GRID_NAME))
    click = await bot.body_of(conn, interrupt_id, enterprise={"id": "E01GRID", "name": "ours"})
    assert (await bot.click(click)).status == 200
    assert await decided_by(conn) == [(ALICE.key, GRID_NAME)]
    assert {call.method for call in proxy.calls} == {"auth.test"}


async def test_an_outsider_who_is_listed_with_their_team_decides(bot: Caller, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=tier(GROUP, "slack:T0OTHER/U0EXT"))
    assert "not on the list" in await refused(bot, conn, interrupt_id, by="U0EXT")
    assert (await bot.click(await bot.body_of(conn, interrupt_id, by="U0EXT", team="T0OTHER"))).status == 200
    assert await decided_by(conn) == [("slack:T0OTHER/U0EXT", "slack:T0OTHER/U0EXT")]


@pytest.mark.parametrize("name", ["U01ALICE", GROUP])
async def test_whoever_comes_without_a_team_is_the_member_whom_slack_knows(
    bot: Caller, conn: Connection, name: str
) -> None:
    interrupt_id = await ask(conn, tier=tier(name))
    assert (await bot.click(without_team(await bot.body_of(conn, interrupt_id)))).status == 200
    # The same voice as in every other click of hers.
    assert await decided_by(conn) == [(ALICE.key, name)]


@pytest.mark.parametrize("kind", [{"team_id": "T0OTHER"}, {"team_id": None}], ids=str)
async def test_whoever_comes_without_a_team_and_is_no_member_is_nobody(
    bot: Caller, proxy: FaultProxy, conn: Connection, kind: dict[str, Any]
) -> None:
    proxy.members["U01ALICE"] = kind
    interrupt_id = await ask(conn, tier=tier(GROUP, "U01ALICE"))
    click = without_team(await bot.body_of(conn, interrupt_id))
    assert "not on the list" in await refused_click(bot, conn, interrupt_id, click)


async def test_nobody_decides_their_own_request_for_a_group_and_the_same_id_of_another_team_is_not_theirs(
    bot: Caller, conn: Connection
) -> None:
    own = await ask(conn, tier=tier(GROUP), requested_by="U01ALICE")
    assert "nobody decides a request of their own" in await refused(bot, conn, own)
    others = await ask(conn, "t2", tier=tier(GROUP), requested_by="slack:T0OTHER/U01ALICE")
    assert (await bot.click(await bot.body_of(conn, others))).status == 200
    assert (await approval_of(conn, others)).status == "approved"


async def alice_away(conn: Connection, delegate: str = "U02BOB") -> None:
    async with conn.transaction():
        await away(conn, ALICE, to=delegate, until=datetime.now(UTC) + timedelta(days=1), made_by=ALICE.key)


async def test_a_delegate_who_is_not_in_the_group_decides_for_whom_the_list_names(
    bot: Caller, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", GROUP))
    await alice_away(conn)
    assert (await bot.click(await bot.body_of(conn, interrupt_id, by="U02BOB"))).status == 200
    assert await all_rows(conn, "SELECT person, for_person FROM decisions") == [
        {"person": BOB.key, "for_person": ALICE.key}
    ]


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_who_is_no_full_member_decides_for_nobody_who_is_away(
    bot: Caller, proxy: FaultProxy, conn: Connection, kind: dict[str, Any]
) -> None:
    proxy.members["U02BOB"] = kind
    await alice_away(conn)
    interrupt_id = await ask(conn, tier=tier("U01ALICE"))
    note = await refused(bot, conn, interrupt_id, by="U02BOB")
    assert "only a full member of this workspace decides for Alice" in note
    # Whoever is listed for themselves may decide, whatever they are, and costs Slack no question.
    listed = await ask(conn, "t2", tier=tier("U02BOB", "U01ALICE"))
    asked = len(proxy.calls_of("users.info"))
    assert (await bot.click(await bot.body_of(conn, listed, by="U02BOB"))).status == 200
    assert (await approval_of(conn, listed)).status == "approved"
    assert len(proxy.calls_of("users.info")) == asked == 1


async def test_an_outsider_decides_for_nobody_who_is_away(bot: Caller, conn: Connection) -> None:
    await alice_away(conn, "slack:T0OTHER/U02BOB")
    interrupt_id = await ask(conn, tier=tier("U01ALICE", GROUP))
    assert "only a full member" in await refused(bot, conn, interrupt_id, by="U02BOB", team="T0OTHER")


async def test_where_slack_does_not_say_nobody_decides_for_who_is_away_and_that_is_kept(
    bot: Caller, proxy: FaultProxy, conn: Connection
) -> None:
    await alice_away(conn)
    interrupt_id = await ask(conn, tier=tier("U01ALICE"))
    proxy.fail("users.info", "500")
    assert "did not say who you are" in await refused(bot, conn, interrupt_id, by="U02BOB")
    assert await refusals(conn) == [(BOB.key, "slack", "Slack did not say who you are: click again in a moment")]


async def test_a_form_is_decided_by_whoever_is_in_the_group(bot: Caller, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call(), tier=tier(GROUP))
    values = {"step-0": {"step-0": {"type": "radio_buttons", "selected_option": {"value": "approve"}}}}
    status, errors = await bot.submit(conn, interrupt_id, values, by="U02BOB")
    assert (status, "not on the list" in errors["step-0"]) == (200, True)
    assert await bot.submit(conn, interrupt_id, values) == (200, {})
    assert await decided_by(conn) == [(ALICE.key, GROUP)]


# When Slack does not say


@pytest.mark.parametrize("method", ["usergroups.list", "users.info"])
@pytest.mark.parametrize("kind", ["500", "503", "429", "error", "hang"])
async def test_where_slack_does_not_say_the_click_is_refused_and_nothing_is_kept(
    bot: Caller, proxy: FaultProxy, conn: Connection, *, method: str, kind: FaultKind
) -> None:
    interrupt_id = await ask(conn, tier=tier(GROUP))
    proxy.fail(method, kind, error="missing_scope", delay_s=3600)
    began = time.monotonic()
    assert await refused(bot, conn, interrupt_id) == UNSAID
    assert await refusals(conn) == [(ALICE.key, "slack", UNSAID.removesuffix("."))]
    # Slack would show an error of its own after three seconds.
    assert time.monotonic() - began < 3.0

    assert (await bot.click(await bot.body_of(conn, interrupt_id))).status == 200
    assert await decided_by(conn) == [(ALICE.key, GROUP)]


async def test_a_person_without_a_team_is_refused_where_slack_does_not_say_who_they_are(
    bot: Caller, proxy: FaultProxy, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE"))
    proxy.fail("users.info", "500")
    note = await refused_click(bot, conn, interrupt_id, without_team(await bot.body_of(conn, interrupt_id)))
    assert note == "Slack did not say who you are: click again in a moment."


# For a minute


async def test_what_slack_said_is_kept_for_a_minute_and_no_longer(
    bot: Caller, proxy: FaultProxy, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [await ask(conn, f"t{number}", tier=tier(GROUP)) for number in range(3)]
    for interrupt_id in asked[:2]:
        await bot.click(await bot.body_of(conn, interrupt_id))
    assert len(await decided_by(conn)) == 2
    assert [len(proxy.calls_of(method)) for method in ("usergroups.list", "users.info")] == [1, 1]

    proxy.groups[GROUP_ID] = UserGroup(handle="finance-managers", users=[])
    monkeypatch.setattr(groups, "_KEPT_S", 0.0)
    await bot.click(await bot.body_of(conn, asked[2]))
    assert "not on the list" in await bot.note()
    assert len(await decided_by(conn)) == 2


async def test_whoever_stops_being_a_member_decides_nothing_after_a_minute(
    bot: Caller, proxy: FaultProxy, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bot.click(await bot.body_of(conn, await ask(conn, tier=tier(GROUP))))
    proxy.members["U01ALICE"] = {"deleted": True}
    monkeypatch.setattr(groups, "_KEPT_S", 0.0)
    await bot.click(await bot.body_of(conn, await ask(conn, "t2", tier=tier(GROUP))))
    assert "not on the list" in await bot.note()
    assert len(await decided_by(conn)) == 1


async def test_clicks_in_the_same_instant_wait_for_one_question(
    bot: Caller, proxy: FaultProxy, conn: Connection
) -> None:
    asked = [await ask(conn, f"t{number}", tier=tier(GROUP)) for number in range(6)]
    proxy.fail("usergroups.list", "slow", delay_s=0.5)
    clicks = [await bot.body_of(conn, interrupt_id) for interrupt_id in asked]
    await asyncio.gather(*map(bot.click, clicks))
    assert len(await decided_by(conn)) == 6
    assert [len(proxy.calls_of(method)) for method in ("usergroups.list", "users.info")] == [1, 1]


# The inbox


@pytest.fixture
async def visitor(database_url: str, proxy: FaultProxy, conn: Connection) -> AsyncIterator[Visitor]:
    """Alice, signed in to pages of a bot that has Slack."""
    async with (
        client_of(proxy.api_url) as client,
        pages_in_process(database_url, groups=OwnTeam(client)) as site,
        Visitor(site.url) as visiting,
    ):
        await signed_in_at_once(conn, site, visiting, ALICE)
        yield visiting


async def approve(visitor: Visitor, interrupt_id: str) -> PageSeen:
    return await visitor.press(await visitor.get(f"/approvals/{interrupt_id}"), "Approve")


async def test_the_inbox_shows_and_takes_what_waits_for_a_group(visitor: Visitor, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=tier(GROUP))
    await ask(conn, "t2", tier=tier("@others"))
    inbox = await visitor.get("/approvals")
    assert [link for link in inbox.links if interrupt_id in link]
    assert "For me 1" in inbox.text and "t2" not in inbox.text
    assert (await approve(visitor, interrupt_id)).status == 303
    assert await decided_by(conn) == [(ALICE.key, GROUP)]
    assert "Nothing waits for you" in (await visitor.get("/approvals")).text


async def chosen(visitor: Visitor, conn: Connection, asked: list[str]) -> list[tuple[str, str]]:
    """The form that approves all of these, as the page before it was shown."""
    page = await visitor.get("/approvals/bulk?" + "&".join(f"item={each}" for each in asked))
    hashes = [(await approval_of(conn, each)).request_hash for each in asked]
    items = [("item", f"{each}:{digest}") for each, digest in zip(asked, hashes, strict=True)]
    return [("form_token", page.form("Approve").fields["form_token"]), *items]


async def test_many_requests_to_a_group_are_approved_at_once(visitor: Visitor, conn: Connection) -> None:
    asked = [await ask(conn, f"t{number}", tier=tier(GROUP)) for number in range(3)]
    assert (await visitor.post("/approvals/bulk", await chosen(visitor, conn, asked))).status == 200
    assert await decided_by(conn) == [(ALICE.key, GROUP)] * 3


@pytest.mark.parametrize("kind", ["500", "hang"])
async def test_the_inbox_says_when_slack_does_not_say_and_decides_nothing(
    visitor: Visitor, proxy: FaultProxy, conn: Connection, monkeypatch: pytest.MonkeyPatch, *, kind: FaultKind
) -> None:
    interrupt_id, own = await ask(conn, tier=tier(GROUP)), await ask(conn, "t2", tier=tier(GROUP, "U01ALICE"))
    page, path = await visitor.get(f"/approvals/{interrupt_id}"), f"/approvals/{interrupt_id}"
    monkeypatch.setattr(groups, "_KEPT_S", 0.0)
    proxy.fail("usergroups.list", kind, times=99, delay_s=3600)
    inbox = await visitor.get("/approvals")
    assert "Slack did not say which user groups you are in" in inbox.text
    assert "For me 1" in inbox.text and own in inbox.html and interrupt_id not in inbox.html
    for answer in (await visitor.get(path), await visitor.press(page, "Approve")):
        assert (answer.status, UNSAID in answer.text) == (503, True)
    # Looking is no attempt.
    assert await refusals(conn) == [(ALICE.key, "web", UNSAID.removesuffix("."))]
    # What names her is decided as ever.
    assert (await approve(visitor, own)).status == 303
    assert await decided_by(conn) == [(ALICE.key, "U01ALICE")]


async def test_another_amount_that_is_refused_as_slack_does_not_say_is_kept(
    visitor: Visitor, proxy: FaultProxy, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await visitor.get(f"/approvals/{await ask(conn, tier=tier(GROUP))}")
    monkeypatch.setattr(groups, "_KEPT_S", 0.0)
    proxy.fail("usergroups.list", "500", times=99)
    assert (await visitor.press(page, "Ask anew", amount="300")).status == 503
    assert await refusals(conn) == [(ALICE.key, "web", UNSAID.removesuffix("."))]


async def test_a_silent_slack_is_asked_once_whether_a_delegate_is_a_member(
    database_url: str, proxy: FaultProxy, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await alice_away(conn)
    asked = [await ask(conn, f"t{number}", tier=tier("U01ALICE")) for number in range(5)]
    async with (
        client_of(proxy.api_url) as client,
        pages_in_process(database_url, groups=OwnTeam(client)) as site,
        Visitor(site.url) as bob,
    ):
        await signed_in_at_once(conn, site, bob, BOB)
        fields = await chosen(bob, conn, asked)
        monkeypatch.setattr(groups, "_KEPT_S", 0.0)
        proxy.fail("users.info", "500", times=99)
        before = len(proxy.calls_of("users.info"))
        done = await bob.post("/approvals/bulk", fields)
        assert done.text.count("Slack did not say who you are") == 5
        assert len(proxy.calls_of("users.info")) - before == 1
    assert await decided_by(conn) == []


async def test_what_one_of_many_requests_is_refused_for_is_said_beside_it(
    visitor: Visitor, proxy: FaultProxy, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [await ask(conn, tier=tier(GROUP)), await ask(conn, "t2", tier=tier("U01ALICE"))]
    fields = await chosen(visitor, conn, asked)
    monkeypatch.setattr(groups, "_KEPT_S", 0.0)
    proxy.fail("usergroups.list", "500", times=99)
    done = await visitor.post("/approvals/bulk", fields)
    assert UNSAID.removesuffix(".") in done.text
    assert await refusals(conn) == [(ALICE.key, "web", UNSAID.removesuffix("."))]
    assert await decided_by(conn) == [(ALICE.key, "U01ALICE")]


async def test_without_slack_a_group_names_nobody(database_url: str, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=tier(GROUP))
    async with pages_in_process(database_url) as site, Visitor(site.url) as visiting:
        await signed_in_at_once(conn, site, visiting, ALICE)
        assert interrupt_id not in (await visiting.get("/approvals")).html
        assert (await visiting.get(f"/approvals/{interrupt_id}")).status == 404


# At the start


async def test_a_group_that_slack_does_not_have_is_said_at_the_start(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(proxy.api_url) as client:
        with caplog.at_level(logging.WARNING):
            await check_groups(OwnTeam(client), [GROUP, GROUP_ID])
            assert caplog.messages == []
            await check_groups(OwnTeam(client), [GROUP, "@gone", "S0GONE"])
            assert caplog.messages == ["Slack has no user group @gone, S0GONE: it names nobody"]
            proxy.fail("usergroups.list", "error", error="missing_scope")
            await check_groups(OwnTeam(client), [GROUP])
    assert "give the app the scopes of manifest.yml" in caplog.messages[-1]
