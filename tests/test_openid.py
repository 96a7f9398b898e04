"""Sign in with Slack: the person that a click makes, from a token that Slack signed for this sign-in, or nobody."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest

from bot.openid import LoginRefused, Provider, person_of, read_token
from bot.site import Site
from flow.database import Connection
from tests.browsing import PageSeen, Visitor, pages_in_process
from tests.command import Terminal
from tests.local_slack import free_port
from tests.openid_server import (
    CLIENT_ID,
    CLIENT_SECRET,
    OpenIdServer,
    another_key,
    openid_server,
)
from tests.people import ALICE, ask
from tests.rows import all_rows, one_row
from tests.slack_door import OurTeam


@pytest.fixture
async def slack() -> AsyncIterator[OpenIdServer]:
    async with openid_server() as running:
        yield running


@pytest.fixture
async def site(database_url: str, slack: OpenIdServer) -> AsyncIterator[Site]:
    provider = Provider.of(api_url=f"{slack.url}/api/", client_id=CLIENT_ID, client_secret=CLIENT_SECRET)
    ours: Any = OurTeam()
    async with pages_in_process(database_url, openid=provider, groups=ours) as running:
        yield running


@pytest.fixture
async def alice(site: Site) -> AsyncIterator[Visitor]:
    async with Visitor(site.url) as visitor:
        yield visitor


async def come_back(visitor: Visitor, path: str = "/login/slack") -> str:
    """To Slack, where the person agrees: the path that Slack sends the browser back to."""
    to_slack = await visitor.get(path)
    assert to_slack.status == 303
    async with aiohttp.ClientSession() as http, http.get(to_slack.headers["Location"], allow_redirects=False) as agreed:
        return agreed.headers["Location"].removeprefix(visitor.url)


async def is_nobody(visitor: Visitor, conn: Connection, answer: PageSeen, status: int = 403) -> bool:
    assert answer.status == status, answer.text
    assert await all_rows(conn, "SELECT * FROM sessions") == []
    return (await visitor.get("/approvals")).status == 303


async def test_alice_signs_in_with_slack_as_the_person_that_a_click_makes(
    alice: Visitor, site: Site, slack: OpenIdServer, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    page = await alice.get("/login?then=/approvals/" + interrupt_id)
    [start] = [link for link in page.links if link.startswith("/login/slack")]
    answer = await alice.get(await come_back(alice, start))
    assert (answer.status, answer.headers["Location"]) == (303, f"/approvals/{interrupt_id}")
    session = await one_row(conn, "SELECT person, person_name, names, signed_in_by FROM sessions")
    assert session == {
        "person": ALICE.key,
        "person_name": "Alice",
        "names": sorted(ALICE.names),
        "signed_in_by": "slack",
    }
    await alice.press(await alice.get(answer.headers["Location"]), "Approve")
    assert await one_row(conn, "SELECT person, door FROM decisions") == {"person": ALICE.key, "door": "web"}
    [asked], [redeemed] = slack.authorized, slack.redeemed
    assert asked["scope"] == "openid profile" and asked["redirect_uri"] == f"{site.url}/login/slack/callback"
    assert redeemed["client_secret"] == CLIENT_SECRET and CLIENT_SECRET not in str(asked)


async def test_a_running_bot_offers_sign_in_with_slack(
    slack: OpenIdServer, database_url: str, conn: Connection, tmp_path: Path
) -> None:
    port = free_port()
    settings = {"SLACK_CLIENT_ID": CLIENT_ID, "SLACK_CLIENT_SECRET": CLIENT_SECRET, "SLACK_API_URL": f"{slack.url}/api"}
    url = f"http://localhost:{port}"
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, PORT=str(port), PUBLIC_URL=url, **settings)
    async with terminal.service("bot") as bot, Visitor(url) as alice:

        async def offered() -> bool:
            try:
                return "/login/slack?then=/approvals" in (await alice.get("/login")).links
            except aiohttp.ClientConnectionError:
                return False

        await bot.until(offered)
        answer = await alice.get(await come_back(alice))
        assert (answer.status, answer.headers["Location"]) == (303, "/approvals")
        assert (await one_row(conn, "SELECT person FROM sessions"))["person"] == ALICE.key
        assert "Alice" in (await alice.get("/approvals")).text
        assert CLIENT_SECRET not in bot.err and "code-1" not in bot.err


async def test_a_member_of_another_team_is_another_person(
    alice: Visitor, slack: OpenIdServer, conn: Connection
) -> None:
    await ask(conn)
    slack.claims = {"https://slack.com/team_id": "T02OTHER"}
    assert (await alice.get(await come_back(alice))).status == 303
    session = await one_row(conn, "SELECT person, names FROM sessions")
    assert session == {"person": "slack:T02OTHER/U01ALICE", "names": ["slack:T02OTHER/U01ALICE"]}
    assert "250.00" not in (await alice.get("/approvals?view=all")).text


def at(seconds: int) -> int:
    return int(time.time()) + seconds


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"aud": "another.client"},
        {"aud": None},
        {"aud": [CLIENT_ID, "another.client"]},
        {"iss": "https://evil.example"},
        {"iss": None},
        {"exp": -120},
        {"exp": None},
        {"iat": 600},
        {"iat": None},
        {"nbf": 600},
        {"https://slack.com/user_id": None},
        {"https://slack.com/team_id": None},
        {"https://slack.com/team_id": "T01TEST/U02BOB"},
        {"https://slack.com/user_id": ["U01ALICE"]},
    ],
    ids=str,
)
async def test_a_token_that_is_not_for_this_sign_in_signs_nobody_in(
    alice: Visitor, slack: OpenIdServer, conn: Connection, claims: dict[str, Any]
) -> None:
    # Times are seconds from now.
    slack.claims = {name: at(given) if isinstance(given, int) else given for name, given in claims.items()}
    assert await is_nobody(alice, conn, await alice.get(await come_back(alice)))


def signed_by_another(slack: OpenIdServer) -> None:
    slack.published, slack.key = slack.key, another_key()


def signed_with_the_public_key(slack: OpenIdServer) -> None:
    slack.algorithm = "HS256"


def unknown_key(slack: OpenIdServer) -> None:
    slack.header = {"kid": "two"}


def another_algorithm(slack: OpenIdServer) -> None:
    slack.algorithm = "PS256"


@pytest.mark.parametrize(
    "spoil", [signed_by_another, signed_with_the_public_key, unknown_key, another_algorithm], ids=lambda f: f.__name__
)
async def test_a_token_that_slack_did_not_sign_signs_nobody_in(
    alice: Visitor, slack: OpenIdServer, conn: Connection, spoil: Callable[[OpenIdServer], None]
) -> None:
    spoil(slack)
    assert await is_nobody(alice, conn, await alice.get(await come_back(alice)))


async def test_a_token_without_a_signature_is_none(slack: OpenIdServer) -> None:
    provider = Provider.of(api_url=f"{slack.url}/api/", client_id=CLIENT_ID, client_secret=CLIENT_SECRET)
    keys = {"keys": [slack.key.as_dict(private=False)]}
    good = slack.signed("n")
    assert read_token(good, keys, provider, nonce="n", now=time.time())["name"] == "Alice"
    header, payload, _ = good.split(".")
    unsigned = "eyJhbGciOiJub25lIn0"
    for token in (f"{header}.{payload}.", f"{unsigned}.{payload}.", "x", "", "..", f"{header}.{payload}"):
        with pytest.raises(LoginRefused):
            read_token(token, keys, provider, nonce="n", now=time.time())
    empty: dict[str, Any] = {}
    unusable: list[dict[str, Any]] = [empty, {"keys": []}, {"keys": "x"}, {"keys": [empty]}]
    for broken in unusable:
        with pytest.raises(LoginRefused):
            read_token(good, broken, provider, nonce="n", now=time.time())


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ((200, {"ok": False, "error": "invalid_code"}), 403),
        ((200, {"ok": True}), 403),
        ((200, {"ok": "true", "id_token": "x.y.z"}), 403),
        ((200, []), 403),
        ((500, {"ok": True, "id_token": "x.y.z"}), 403),
    ],
    ids=str,
)
async def test_a_slack_that_gives_no_token_signs_nobody_in(
    alice: Visitor, slack: OpenIdServer, conn: Connection, answer: tuple[int, Any], status: int
) -> None:
    slack.answer = answer
    assert await is_nobody(alice, conn, await alice.get(await come_back(alice)), status)


@pytest.mark.parametrize("spoil", ["state", "no state", "no cookie", "another's cookie", "tampered", "late", "error"])
async def test_coming_back_to_another_browser_or_too_late_signs_nobody_in(
    alice: Visitor, site: Site, slack: OpenIdServer, conn: Connection, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await come_back(alice)
    state = parse_qs(urlsplit(path).query)["state"][0]
    name = site.cookie_name("login")
    if spoil == "state":
        path = path.replace(state, "A" * 43)
    elif spoil == "no state":
        path = path.partition("&state=")[0]
    elif spoil == "no cookie":
        del alice.cookies[name]
    elif spoil == "another's cookie":
        async with Visitor(site.url) as other:
            await other.get("/login/slack")
            alice.cookies[name] = other.cookies[name]
    elif spoil == "tampered":
        alice.cookies[name] = alice.cookies[name].replace(state, "A" * 43)
        path = path.replace(state, "A" * 43)
    elif spoil == "late":
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 601)
    else:
        path += "&error=access_denied"
    assert await is_nobody(alice, conn, await alice.get(path))
    assert slack.redeemed == []


async def test_a_state_is_good_for_one_sign_in(alice: Visitor, conn: Connection) -> None:
    path = await come_back(alice)
    assert (await alice.get(path)).status == 303
    assert (await alice.get(path)).status == 403
    assert len(await all_rows(conn, "SELECT * FROM sessions")) == 1


async def test_a_slack_that_is_away_is_said_so(database_url: str, conn: Connection, slack: OpenIdServer) -> None:
    provider = Provider.of(api_url=f"{slack.url}/api/", client_id=CLIENT_ID, client_secret=CLIENT_SECRET)
    async with pages_in_process(database_url, openid=provider) as site, Visitor(site.url) as visitor:
        path = await come_back(visitor)
        # Its token endpoint and keys are asked at a port where nobody listens.
        object.__setattr__(provider, "base", "http://127.0.0.1:9")
        assert await is_nobody(visitor, conn, await visitor.get(path), 503)


def test_without_a_bot_token_a_bare_member_id_names_nobody() -> None:
    claims = {"https://slack.com/user_id": "U01ALICE", "https://slack.com/team_id": "T01TEST"}
    assert person_of(claims, frozenset()).names == {"slack:T01TEST/U01ALICE"}


def test_slacks_own_addresses_are_the_default() -> None:
    provider = Provider.of(api_url="https://slack.com/api/", client_id="1.2", client_secret="x")
    assert provider.base == "https://slack.com"
