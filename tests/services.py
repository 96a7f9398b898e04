"""The bot and its worker as processes before a Slack that only remembers, and people who click until they are heard.

For tests in which the database or a process goes away: claims are filed and approved by the dozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web

from flow.database import Connection, connect
from tests.command import ROOT, Running, Terminal, worker
from tests.local_slack import BOT_TOKEN, CHANNEL, SIGNING_SECRET, free_port
from tests.machines import Machine
from tests.people import start_claim
from tests.rows import all_rows, until, value
from tests.slack_door import Caller

# What Slack gives a click.
CLICK_S = 3.0

# Slack's one message a second, and the half minute until a dead deliverer's work is taken over, are waits that no fact
# here is about.
_HURRIED = """
import bot.outlet, claim_flow, flow.notices
bot.outlet._BETWEEN_POSTS_S = 0.0
flow.notices.LEASE_S = 3.0
claim_flow.main()
"""


class QuietSlack:
    """The Web API of a workspace that says yes at once: `async with QuietSlack() as slack`, SLACK_API_URL `slack.url`,
    or `slack.url_at` one of the other addresses that it is given.

    `messages` are those that stand in the channel, as they were written last, by ts; `views` the modals that were
    opened, as they are now; `opened` what they showed at first; `homes` the Home views that were published, with whose
    they are. What a trigger id is called, opening fails with: "expired_trigger_id" has expired. `zones` are people's
    time zones, `kinds` what else `users.info` says of them, `groups` the user groups by id and handle; of those in
    `silent` it never says anything. `busy` are the Retry-After of the next Homes, which are not taken.
    """

    def __init__(self, *others: str) -> None:
        self.url, self._others = "", others
        self.messages: dict[str, dict[str, Any]] = {}
        self.views: list[dict[str, Any]] = []
        self.opened: list[dict[str, Any]] = []
        # Whether whoever opened a modal has closed it by the time it is filled.
        self.closes_modals = False
        self.homes: list[tuple[str, dict[str, Any]]] = []
        self.zones: dict[str, str] = {}
        self.silent: set[str] = set()
        self.groups: dict[tuple[str, str], list[str]] = {}
        self.busy: list[int] = []
        self.kinds: dict[str, dict[str, Any]] = {}
        # What posting at a place fails with.
        self.refuses: dict[str, str] = {}
        self._seconds = itertools.count(1_700_000_000)

    async def __aenter__(self) -> Self:
        app = web.Application()
        for method, handler in {
            "auth.test": self._test_auth,
            "chat.postMessage": self._post,
            "chat.update": self._update,
            "views.open": self._open,
            "views.update": self._change_view,
            "views.publish": self._publish,
            "users.info": self._user,
            "usergroups.list": self._groups,
            "conversations.history": self._history,
            "conversations.replies": self._history,
        }.items():
            app.router.add_route("*", f"/api/{method}", handler)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        for address in self._others:
            await web.TCPSite(self._runner, address, self._runner.addresses[0][1]).start()
        self.url = self.url_at("127.0.0.1")
        return self

    def url_at(self, address: str) -> str:
        return f"http://{address}:{self._runner.addresses[0][1]}/api/"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def cards(self) -> dict[str, list[str]]:
        """The text of every card, by thread id."""
        return self._texts("approval_requested")

    def replies(self) -> dict[str, list[str]]:
        """What is said below the cards, by thread id."""
        return self._texts("approval_outcome")

    def _texts(self, event: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for message in self.messages.values():
            if message["metadata"]["event_type"] == event:
                found.setdefault(message["metadata"]["event_payload"]["thread_id"], []).append(message["text"])
        return found

    async def _test_auth(self, _: web.Request) -> web.Response:
        return web.json_response({"ok": True, "team_id": "T01TEST", "user_id": "U0BOT", "bot_id": "B0BOT"})

    async def _post(self, request: web.Request) -> web.Response:
        ts, message = f"{next(self._seconds)}.000100", await request.json()
        if error := self.refuses.get(message["channel"]):
            return web.json_response({"ok": False, "error": error})
        self.messages[ts] = message | {"ts": ts}
        return web.json_response({"ok": True, "channel": CHANNEL, "ts": ts, "message": {}})

    async def _update(self, request: web.Request) -> web.Response:
        message = await request.json()
        self.messages[message["ts"]] |= message
        return web.json_response({"ok": True, "channel": CHANNEL, "ts": message["ts"], "text": ""})

    async def _open(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["trigger_id"].endswith("_trigger_id"):
            return web.json_response({"ok": False, "error": asked["trigger_id"]})
        self.opened.append(asked["view"])
        self.views.append(asked["view"])
        return web.json_response({"ok": True, "view": {"id": f"V{len(self.views)}", "hash": "1.0"}})

    async def _change_view(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.closes_modals:
            return web.json_response({"ok": False, "error": "not_found"})
        if asked["hash"] != "1.0":
            return web.json_response({"ok": False, "error": "hash_conflict"})
        self.views[int(asked["view_id"][1:]) - 1] = asked["view"]
        return web.json_response({"ok": True, "view": {"id": asked["view_id"], "hash": "1.0"}})

    async def _publish(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.busy:
            headers = {"Retry-After": str(self.busy.pop(0))}
            return web.json_response({"ok": False, "error": "ratelimited"}, status=429, headers=headers)
        self.homes.append((asked["user_id"], asked["view"]))
        return web.json_response({"ok": True, "view": {"id": "V2"}})

    async def _user(self, request: web.Request) -> web.Response:
        user = request.query["user"]
        if user in self.silent:
            await asyncio.Event().wait()
        kind = {"deleted": False, "is_bot": False, "is_restricted": False, "is_ultra_restricted": False}
        known = {"id": user, "team_id": "T01TEST", "tz": self.zones.get(user), **kind} | self.kinds.get(user, {})
        return web.json_response({"ok": True, "user": known})

    async def _groups(self, _: web.Request) -> web.Response:
        groups = [{"id": id_, "handle": name, "users": users} for (id_, name), users in self.groups.items()]
        return web.json_response({"ok": True, "usergroups": groups})

    async def _history(self, _: web.Request) -> web.Response:
        return web.json_response({"ok": True, "messages": list(self.messages.values()), "has_more": False})


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim that waits, and Alice's signed click on Approve, made while the database was there."""

    thread_id: str
    interrupt_id: str
    approve: bytes


class Town:
    """One database, a Slack, a folder to run services in, and Alice: `async with Town(url, terminal) as town`."""

    def __init__(self, database_url: str, terminal: Terminal, *others: str) -> None:
        self.terminal, self.slack = terminal, QuietSlack(*others)
        self._url, self._names = database_url, itertools.count(1)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.slack)
            # The bot's address is where its port is, whichever process is the bot.
            self.port = free_port()
            self.caller = await stack.enter_async_context(Caller(f"http://127.0.0.1:{self.port}"))
            self.terminal.environment |= {
                "DATABASE_URL": self._url,
                "PORT": str(self.port),
                "APPROVERS": "U01ALICE,U02BOB",
                "SLACK_API_URL": self.slack.url,
                "SLACK_BOT_TOKEN": BOT_TOKEN,
                "SLACK_CHANNEL": CHANNEL,
                "SLACK_SIGNING_SECRET": SIGNING_SECRET,
                "PYTHONPATH": str(ROOT),
            }
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def service(self, command: str, on: Machine | None = None, /, **settings: str) -> AsyncIterator[Running]:
        """`serve`, `bot` or `work`, from the moment when it is ready; its settings may differ from the town's."""
        name = f"{next(self._names)}-{command}"
        out, err = self.terminal.folder / f"{name}.out", self.terminal.folder / f"{name}.err"
        environment = self.terminal.environment | settings
        with out.open("xb") as to_out, err.open("xb") as to_err:
            process = await asyncio.create_subprocess_exec(
                *(on.prefix if on else []),
                sys.executable,
                "-c",
                _HURRIED,
                command,
                cwd=self.terminal.folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
            )
        running = Running(process, out, err)
        try:
            port = int(environment["HEALTH_PORT" if command == "work" else "PORT"])
            await running.until(lambda: is_ready(port, on.inside if on else "127.0.0.1"))
            yield running
        finally:
            await running.stop()

    def worker(self, conn: Connection, **settings: str) -> contextlib.AbstractAsyncContextManager[Running]:
        """`work` beside a `bot`; what there is to tell Slack is left to the bot."""
        ours = {name: self.terminal.environment[name] for name in ("DATABASE_URL", "APPROVERS")}
        return worker(Terminal(self.terminal.folder, **ours, **settings), conn)

    async def waiting(self, conn: Connection, thread_ids: Sequence[str]) -> list[Claim]:
        """New claims of 250 USD, once they all wait for Alice or Bob."""
        for thread_id in thread_ids:
            await start_claim(conn, thread_id)

        async def asked() -> list[dict[str, Any]]:
            rows = await all_rows(
                conn,
                "SELECT thread_id, interrupt_id FROM approvals JOIN threads USING (thread_id)"
                " WHERE threads.status = 'waiting' AND thread_id = ANY(%s) ORDER BY 1",
                list(thread_ids),
            )
            return rows if len(rows) == len(thread_ids) else []

        return [
            Claim(**row, approve=await self.caller.body_of(conn, row["interrupt_id"]))
            for row in await until(asked, within_s=60)
        ]

    async def click(self, body: bytes, *, caller: Caller | None = None) -> int | None:
        """The status that the bot answers in time; None if there is no bot, or no answer within Slack's patience.

        A form that is to be sent again is answered with an error in it: 503, too.
        """
        try:
            async with asyncio.timeout(CLICK_S):
                answered = await (caller or self.caller).click(body)
                return 503 if "send it again" in answered.body else answered.status
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def click_until_heard(self, body: bytes, *, within_s: float = 60.0, every_s: float = 0.2) -> int:
        """Click again as long as it is not acknowledged, as a person does; how often it was not."""
        deadline, unheard = time.monotonic() + within_s, 0
        while await self.click(body) != 200:
            unheard += 1
            assert time.monotonic() < deadline, f"no click was acknowledged within {within_s} s"
            await asyncio.sleep(every_s)
        return unheard

    async def until_posted(self, claims: Sequence[Claim]) -> None:
        """Return when each of them has its card: an outcome is shown to those who were shown the request."""

        async def posted() -> bool:
            return self.slack.cards().keys() >= {claim.thread_id for claim in claims}

        await until(posted, within_s=60)

    async def assert_shown_as_paid(self, thread_ids: Sequence[str]) -> None:
        """In the end everybody sees of each of these claims, once, that it is paid."""

        async def shown() -> bool:
            cards, replies = self.slack.cards(), self.slack.replies()
            return all("Paid: " in "".join(cards.get(each, [])) and each in replies for each in thread_ids)

        await until(shown, within_s=60)
        cards, replies = self.slack.cards(), self.slack.replies()
        often = {each: (len(cards[each]), len(replies[each])) for each in thread_ids}
        assert often == dict.fromkeys(thread_ids, (1, 1))


# What a stand-by's session did last before it waits for its thread.
READY_STANDBYS = """
    FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'claim_flow drive'
    AND pid <> pg_backend_pid() AND state = 'idle' AND query = 'ROLLBACK'
"""


async def standbys_are_ready(conn: Connection, count: int) -> bool:
    return bool(await value(conn, f"SELECT count(*) = %s {READY_STANDBYS}", count))


@contextlib.asynccontextmanager
async def held(url: str, interrupt_ids: Sequence[str]) -> AsyncIterator[int]:
    """These approvals' rows are locked, so that clicks on them wait; by the session with this backend pid."""
    async with await connect(url, "listen") as holder, holder.transaction():
        await holder.execute(
            "SELECT FROM approvals WHERE interrupt_id = ANY(%s) ORDER BY interrupt_id FOR UPDATE",
            (list(interrupt_ids),),
        )
        yield holder.info.backend_pid


async def until_held_up(conn: Connection, count: int, *, by: int) -> None:
    """Return when so many sessions wait for this one, and so can go no further."""

    async def waiting() -> bool:
        waiters = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
        return bool(await value(conn, waiters, by) >= count)

    await until(waiting)


async def is_ready(port: int, host: str = "127.0.0.1") -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/readyz") as response:
            return response.status == 200
    return False
