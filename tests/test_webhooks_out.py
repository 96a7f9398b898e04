"""Every event reaches every endpoint once, signed, however slow, broken or hostile the endpoints are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from bot import webhooks_out
from bot.webhooks_out import (
    RETRIES_S,
    Receiver,
    WebhookDeliverer,
    deliverer_to,
    receivers_of,
    signed_headers,
)
from flow import deliveries
from flow.addresses import is_public
from flow.approvals import decide
from flow.database import Connection, Lock, is_present
from flow.deliveries import EndpointState, add_endpoints, endpoint_states
from flow.errors import SettingError, UnknownEndpoint, UnknownEvent
from flow.settings import read_settings
from tests.api_door import OLD_SECRET, OTHER_SECRET, SECRET
from tests.command import ROOT, Terminal
from tests.hook_server import Fault, HookServer, other_server
from tests.local_slack import free_port
from tests.people import ANN, YES, ask
from tests.rows import all_rows, one_row, until, value
from tests.wire import Wire

# Long enough for a local answer on a busy machine, short beside the one that never comes.
PATIENCE_S = 3.0

Sweep = Callable[..., Coroutine[Any, Any, tuple[int, int]]]


@pytest.fixture
async def acme(conn: Connection) -> AsyncIterator[HookServer]:
    """An endpoint, from before anything happens."""
    await add_endpoints(conn, ["acme"])
    async with HookServer() as server:
        yield server
    assert server.mistakes == []


@pytest.fixture
async def ops(conn: Connection) -> AsyncIterator[HookServer]:
    await add_endpoints(conn, ["ops"])
    async with other_server() as server:
        yield server
    assert server.mistakes == []


@pytest.fixture
def sweep(database_url: str) -> Sweep:
    """Deliver once to these receivers: how many were sent, and how many not."""

    async def swept(*receivers: Receiver, **how: Any) -> tuple[int, int]:
        async with deliverer_for(receivers, **how) as deliverer:
            counts: tuple[int, int] = await deliverer.sweep(database_url)
            return counts

    return swept


def deliverer_for(receivers: Sequence[Receiver], **how: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    usual: dict[str, Any] = {"is_allowed": lambda _: True, "call_s": PATIENCE_S}
    return deliverer_to(receivers, **(usual | how))


@contextlib.asynccontextmanager
async def running(url: str, *receivers: Receiver, **how: Any) -> AsyncIterator[WebhookDeliverer]:
    """A deliverer that runs, as it does in a server."""
    async with deliverer_for(receivers, **how) as deliverer, asyncio.TaskGroup() as group:
        task = group.create_task(deliverer.run(url))
        await until(lambda: is_connected(deliverer))
        yield deliverer
        task.cancel()


async def is_connected(deliverer: WebhookDeliverer) -> bool:
    return deliverer.connected


async def make_due(conn: Connection) -> None:
    """Let the time pass until everything is due."""
    await conn.execute("UPDATE webhook_deliveries SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
    await conn.execute("UPDATE webhook_endpoints SET quiet_until = NULL")


async def delivery(conn: Connection) -> dict[str, Any]:
    """The only one."""
    return await one_row(
        conn,
        "SELECT status, attempt, tries, error, extract(epoch FROM due_at - clock_timestamp())::float8 AS wait_s"
        " FROM webhook_deliveries",
    )


async def state_of(conn: Connection, name: str = "acme") -> EndpointState:
    [state] = [each for each in await endpoint_states(conn, limit=10) if each.name == name]
    return state


# What is sent


async def test_an_event_reaches_its_endpoint_signed(conn: Connection, acme: HookServer, sweep: Sweep) -> None:
    interrupt_id = await ask(conn)
    assert await sweep(acme.named()) == (1, 0)
    [received] = acme.received
    event_id = await value(conn, "SELECT id FROM events")
    assert received.id == f"evt_{event_id}_acme"
    assert abs(received.timestamp - time.time()) < 60
    assert sorted(received.event) == ["data", "timestamp", "type"]
    assert (received.event["type"], received.event["data"]["interrupt_id"]) == ("approval.requested", interrupt_id)
    at = await value(conn, "SELECT created_at FROM events")
    assert datetime.fromisoformat(received.event["timestamp"]) == at
    assert received.body == json.dumps(received.event, sort_keys=True, separators=(",", ":")).encode()
    # And once.
    assert await sweep(acme.named()) == (0, 0)
    assert (await delivery(conn))["status"] == "sent"


def test_the_signature_is_the_standards() -> None:
    receiver = Receiver(name="acme", url="https://acme.example.com", secrets=(SECRET,))
    at = datetime.fromtimestamp(1614265330, tz=UTC)
    assert signed_headers(receiver, "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', at=at) == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_while_a_secret_is_replaced_both_sign() -> None:
    receiver = Receiver(name="acme", url="https://acme.example.com", secrets=(SECRET, OLD_SECRET))
    headers = signed_headers(receiver, "evt_1_acme", b"{}", at=datetime.now(UTC))
    for secret in receiver.secrets:
        Webhook(secret).verify(b"{}", headers)
    assert headers["webhook-signature"].count("v1,") == 2


async def test_every_attempt_has_the_same_id_and_bytes_and_its_own_time(
    conn: Connection, acme: HookServer, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme.faults.append(Fault(status=500))
    interrupt_id = await ask(conn)
    await sweep(acme.named())
    # The facts have moved on; what happened then has not.
    await conn.execute("UPDATE approvals SET tier = 'other' WHERE interrupt_id = %s", (interrupt_id,))
    await make_due(conn)
    later = datetime.now(UTC) + timedelta(seconds=100)
    monkeypatch.setattr(webhooks_out, "_now", lambda: later)
    await sweep(acme.named())
    first, second = acme.received
    assert (first.id, first.body) == (second.id, second.body)
    assert second.timestamp == int(later.timestamp()) > first.timestamp


# Fan-out


async def test_each_endpoint_gets_each_event_once(
    conn: Connection, acme: HookServer, ops: HookServer, sweep: Sweep
) -> None:
    interrupt_id = await ask(conn)
    await decide(conn, interrupt_id, ANN, YES)
    assert await sweep(acme.named(), ops.named("ops")) == (6, 0)
    assert acme.types == ops.types == ["approval.requested", "approval.voted", "approval.decided"]
    assert set(acme.ids).isdisjoint(ops.ids)


async def test_a_slow_endpoint_delays_no_other(
    database_url: str, conn: Connection, acme: HookServer, ops: HookServer
) -> None:
    freed = asyncio.Event()
    acme.usual = Fault(held=freed)
    async with running(database_url, acme.named(), ops.named("ops"), call_s=60.0):
        for number in range(5):
            await ask(conn, f"t{number}")
        await until(lambda: ops.got(5))
        await until(lambda: acme.got(1))
        freed.set()
        await until(lambda: acme.got(5))
    assert (len(set(acme.ids)), len(acme.ids)) == (5, 5)


async def test_a_failing_endpoint_does_not_make_others_hear_twice(
    conn: Connection, acme: HookServer, ops: HookServer, sweep: Sweep
) -> None:
    acme.usual = Fault(status=500)
    await ask(conn)
    for _ in range(3):
        await sweep(acme.named(), ops.named("ops"))
        await make_due(conn)
    assert (len(acme.ids), len(ops.ids)) == (3, 1)


async def test_two_deliverers_side_by_side_send_each_event_once(
    database_url: str, conn: Connection, acme: HookServer
) -> None:
    async with running(database_url, acme.named()), running(database_url, acme.named()):
        for number in range(30):
            await ask(conn, f"t{number}")
        await until(lambda: acme.got(30))
    assert len(set(acme.ids)) == len(acme.ids) == 30


async def test_deliverers_with_other_settings_look_after_their_own(
    database_url: str, conn: Connection, acme: HookServer, ops: HookServer, sweep: Sweep
) -> None:
    async with running(database_url, acme.named()):
        await ask(conn, "t1")
        await until(lambda: acme.got(1))
        assert ops.received == []
        async with running(database_url, acme.named(), ops.named("ops")):
            await ask(conn, "t2")
            await until(lambda: acme.got(2))
            # It gets what happened while nobody had its URL, too.
            await until(lambda: ops.got(2))
    assert await sweep(acme.named(), ops.named("ops")) == (0, 0)
    assert [each.event["data"]["thread"] for each in ops.received] == ["t1", "t2"]


async def test_a_new_endpoint_gets_what_happens_from_then_on(conn: Connection, acme: HookServer, sweep: Sweep) -> None:
    await ask(conn, "t1")
    await add_endpoints(conn, ["acme", "new"])
    await ask(conn, "t2")
    async with other_server() as new:
        await sweep(acme.named(), new.named("new"))
        assert [each.event["data"]["thread"] for each in acme.received] == ["t1", "t2"]
        assert [each.event["data"]["thread"] for each in new.received] == ["t2"]
        await add_endpoints(conn, ["new"])
        assert await sweep(new.named("new")) == (0, 0)


async def test_an_event_that_is_committed_late_is_sent_too(
    conn: Connection, crowd: list[Connection], acme: HookServer, sweep: Sweep
) -> None:
    slow = crowd[0]
    async with slow.transaction():
        await ask(slow, "t1")
        await ask(conn, "t2")
        assert await sweep(acme.named()) == (1, 0)
    assert await sweep(acme.named()) == (1, 0)
    assert [each.event["data"]["thread"] for each in acme.received] == ["t2", "t1"]


async def test_an_endpoint_that_is_added_while_an_event_is_written_gets_it(
    conn: Connection, crowd: list[Connection], sweep: Sweep
) -> None:
    slow = crowd[0]
    async with slow.transaction():
        await ask(slow, "t1")
        await add_endpoints(conn, ["acme"])
    async with HookServer() as server:
        assert await sweep(server.named()) == (1, 0)


# What may go wrong on the way


@pytest.mark.parametrize("status", [300, 301, 302, 307, 400, 401, 404, 408, 429, 500, 503])
async def test_whatever_is_no_success_is_tried_again(
    conn: Connection, acme: HookServer, sweep: Sweep, status: int
) -> None:
    acme.faults.append(Fault(status=status, headers={"Location": "/elsewhere"}, body=b"not\n\n\x00 now"))
    await ask(conn)
    assert await sweep(acme.named()) == (0, 1)
    row = await delivery(conn)
    assert (row["status"], row["error"]) == ("pending", f"answered {status}: not \N{REPLACEMENT CHARACTER} now")
    await make_due(conn)
    assert await sweep(acme.named()) == (1, 0)
    assert (await delivery(conn))["error"] is None


@pytest.mark.parametrize("status", [200, 201, 202, 204])
async def test_every_success_is_one(conn: Connection, acme: HookServer, sweep: Sweep, status: int) -> None:
    acme.faults.append(Fault(status=status))
    await ask(conn)
    assert await sweep(acme.named()) == (1, 0)


async def test_an_event_whose_answer_was_lost_is_sent_again_under_its_id(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    acme.faults.append(Fault(lost=True))
    await ask(conn)
    assert await sweep(acme.named()) == (0, 1)
    assert (await delivery(conn))["error"].startswith("no answer: ServerDisconnectedError")
    await make_due(conn)
    assert await sweep(acme.named()) == (1, 0)
    assert acme.ids[0] == acme.ids[1]


async def test_an_endpoint_that_is_not_there_is_tried_again(conn: Connection, acme: HookServer, sweep: Sweep) -> None:
    await ask(conn)
    nowhere = Receiver(name="acme", url=f"http://127.0.0.1:{free_port()}/", secrets=(SECRET,))
    assert await sweep(nowhere) == (0, 1)
    assert (await delivery(conn))["error"].startswith("no answer: ClientConnectorError")


async def test_the_schedule_is_the_standards_and_then_it_is_a_dead_letter(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    acme.usual = Fault(status=500, body=b"broken")
    await ask(conn)
    for wait_s in (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400):
        assert await sweep(acme.named()) == (0, 1)
        # It is not due before its time.
        assert await sweep(acme.named()) == (0, 0)
        row = await delivery(conn)
        assert 0.9 * wait_s - 5 < row["wait_s"] <= 1.1 * wait_s
        await make_due(conn)
    assert await sweep(acme.named()) == (0, 1)
    row = await delivery(conn)
    assert (row["status"], row["tries"], row["error"]) == ("dead", 10, "answered 500: broken")
    await make_due(conn)
    assert await sweep(acme.named()) == (0, 0)
    assert len(set(acme.ids)) == 1


async def test_failures_that_came_together_do_not_return_together(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    acme.usual = Fault(status=500)
    for number in range(10):
        await ask(conn, f"t{number}")
    await conn.execute("UPDATE webhook_deliveries SET tries = 5")
    await sweep(acme.named())
    await conn.execute("UPDATE webhook_deliveries SET tries = 5, due_at = clock_timestamp()")
    await sweep(acme.named())
    spread_s = "SELECT extract(epoch FROM max(due_at) - min(due_at))::float8 FROM webhook_deliveries"
    assert await value(conn, spread_s) > 60


@pytest.mark.parametrize(
    ("retry_after", "wait_s"),
    [
        ("60", 60),
        ("3600", 3600),
        ("0", 5),
        ("999999999", 86_400),
        ("in 90 s", 90),
        ("in 90 s, without a zone", 90),
        ("an hour ago", 5),
        ("soon", 5),
        ("-60", 5),
        ("1e3", 5),
        ("\u0663\u0666".encode().decode("latin-1"), 5),
        ("9" * 400, 5),
        ("Mon, 99 Foo 99999 99:99:99 GMT", 5),
        ("Mon, 01 Jan 99999999999999 00:00:00 GMT", 5),
        ("Mon, 01 Jan 2026 00:00:00 +99999999999999", 5),
    ],
    ids=ascii,
)
async def test_retry_after_is_obeyed_if_it_can_be_read(
    conn: Connection, acme: HookServer, sweep: Sweep, retry_after: str, wait_s: int
) -> None:
    now = datetime.now(UTC)
    dates = {
        "in 90 s": format_datetime(now + timedelta(seconds=91), usegmt=True),
        "in 90 s, without a zone": format_datetime((now + timedelta(seconds=91)).replace(tzinfo=None)),
        "an hour ago": format_datetime(now - timedelta(hours=1), usegmt=True),
    }
    acme.faults.append(Fault(status=503, headers={"Retry-After": dates.get(retry_after, retry_after)}))
    await ask(conn)
    await sweep(acme.named())
    assert wait_s * 0.9 - 5 < (await delivery(conn))["wait_s"] <= max(wait_s * 1.01 + 1, 5.5)


async def test_an_endpoint_that_asks_for_patience_gets_it_for_every_event(
    conn: Connection, acme: HookServer, ops: HookServer, sweep: Sweep
) -> None:
    acme.faults.append(Fault(status=429, headers={"Retry-After": "600"}))
    for number in range(3):
        await ask(conn, f"t{number}")
    assert await sweep(acme.named(), ops.named("ops")) == (3, 1)
    assert (len(acme.ids), len(ops.ids)) == (1, 3)
    assert (await state_of(conn)).quiet_until is not None
    await conn.execute("UPDATE webhook_endpoints SET quiet_until = clock_timestamp()")
    assert await sweep(acme.named()) == (2, 0)


async def test_an_endpoint_that_is_gone_is_turned_off_until_somebody_turns_it_on(
    conn: Connection, acme: HookServer, ops: HookServer, sweep: Sweep
) -> None:
    acme.faults.append(Fault(status=410, body=b"we have moved"))
    for number in range(3):
        await ask(conn, f"t{number}")
    assert await sweep(acme.named(), ops.named("ops")) == (3, 1)
    state = await state_of(conn)
    assert (state.turned_off_at is not None, state.reason) == (True, "answered 410: we have moved")
    assert (state.dead_count, state.waiting) == (1, 2)
    # What happens meanwhile waits as well.
    await ask(conn, "t3")
    await make_due(conn)
    assert await sweep(acme.named()) == (0, 0)
    assert (await state_of(conn)).waiting == 3
    assert await deliveries.resend_dead(conn, "acme", by="cli:ann") == 1
    assert await sweep(acme.named()) == (4, 0)
    assert sorted(set(acme.ids)) == sorted(acme.ids[1:])
    assert (await state_of(conn)).turned_off_at is None


# Answers that are not meant well


async def test_an_endless_answer_is_read_no_further_than_it_is_kept(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    acme.faults.append(Fault(status=500, endless=True))
    await ask(conn)
    began = time.monotonic()
    assert await sweep(acme.named(), call_s=60.0) == (0, 1)
    assert time.monotonic() - began < 30
    error = (await delivery(conn))["error"]
    assert (error.startswith("answered 500: more more"), len(error)) == (True, 200)

    async def has_ended() -> bool:
        return acme.ended == 1

    await until(has_ended)
    # What lies between is the kernel's buffers.
    assert acme.written < 16 << 20


async def test_an_endless_answer_that_is_a_success_is_one(conn: Connection, acme: HookServer, sweep: Sweep) -> None:
    acme.faults.append(Fault(endless=True))
    await ask(conn)
    began = time.monotonic()
    assert await sweep(acme.named(), call_s=60.0) == (1, 0)
    assert time.monotonic() - began < 30


async def test_no_more_than_64_kilobytes_are_read(acme: HookServer) -> None:
    acme.faults.append(Fault(status=500, endless=True))
    async with deliverer_for([acme.named()]) as deliverer:
        [lane] = deliverer._lanes
        body = b"{}"
        headers = {"Content-Type": "application/json"}
        headers |= signed_headers(acme.named(), "evt_1_acme", body, at=datetime.now(UTC))
        async with lane._http.post(acme.url, data=body, headers=headers) as response:
            # Nobody reads: what is held is what was taken from the socket.
            async def is_enough() -> bool:
                assert response.connection is not None
                assert response.connection.protocol is not None
                return bool(response.connection.protocol._reading_paused)

            await until(is_enough)
            assert 0 < response.content.total_bytes <= 1 << 16
            response.close()


async def test_an_answer_that_does_not_come_is_waited_for_so_long_and_no_longer(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    acme.faults.append(Fault(held=asyncio.Event()))
    await ask(conn)
    assert await sweep(acme.named(), call_s=0.5) == (0, 1)
    assert (await delivery(conn))["error"].startswith("no answer: ")


@pytest.mark.parametrize(
    "drip", [b"x", b"HTTP/1.1 200 OK\r\n", b"X-More: x\r\n", b"\x00\xff", b"HTTP/1.1 999999 No\r\n\r\n"], ids=repr
)
async def test_a_server_that_never_comes_to_its_answer_is_left(conn: Connection, sweep: Sweep, drip: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" if drip.startswith(b"X-") else b"")
            while True:
                writer.write(drip)
                await writer.drain()
                await asyncio.sleep(0.01)

    await add_endpoints(conn, ["acme"])
    await ask(conn)
    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        receiver = Receiver(name="acme", url=f"http://127.0.0.1:{port}/", secrets=(SECRET,))
        assert await sweep(receiver, call_s=1.0) == (0, 1)
    assert (await delivery(conn))["error"].startswith("no answer: ")


def test_the_limits_are_five_and_fifteen_seconds_and_a_lease_is_longer() -> None:
    assert (webhooks_out._CONNECT_S, webhooks_out._CALL_S) == (5.0, 15.0)
    assert deliveries.LEASE_S > webhooks_out._CALL_S + 5


# Death


async def test_a_deliverer_that_is_killed_before_it_could_record_has_its_event_sent_again_under_the_same_id(
    tmp_path: Path, database_url: str, conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    acme.faults.append(Fault(held=asyncio.Event()))
    await ask(conn)
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings_for(acme))
    delivering = await terminal.start("deliver")
    await delivering.until(lambda: acme.got(1))
    delivering.kill()
    await delivering.end()
    assert (await delivery(conn))["status"] == "sending"
    # Its lease is respected while it runs.
    assert await sweep(acme.named()) == (0, 0)
    await make_due(conn)
    assert await sweep(acme.named()) == (1, 0)
    assert acme.ids[0] == acme.ids[1]
    assert acme.received[0].body == acme.received[1].body


async def test_a_deliverer_whose_lease_ran_out_changes_nothing_any_more(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    acme.faults.extend((Fault(status=500, held=first), Fault(held=second)))
    await ask(conn)
    slow = asyncio.create_task(sweep(acme.named(), call_s=60.0))
    await until(lambda: acme.got(1))
    await make_due(conn)
    quick = asyncio.create_task(sweep(acme.named(), call_s=60.0))
    await until(lambda: acme.got(2))
    first.set()
    assert await slow == (0, 1)
    row = await delivery(conn)
    assert (row["status"], row["attempt"], row["error"]) == ("sending", 2, None)
    second.set()
    assert await quick == (1, 0)
    assert (await delivery(conn))["status"] == "sent"


async def test_a_deliverer_that_is_stopped_finishes_what_it_is_sending(
    database_url: str, conn: Connection, acme: HookServer
) -> None:
    freed = asyncio.Event()
    acme.faults.append(Fault(held=freed))
    async with deliverer_for([acme.named()], call_s=60.0) as deliverer:
        task = asyncio.create_task(deliverer.run(database_url))
        await ask(conn)
        await until(lambda: acme.got(1))
        task.cancel()
        freed.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert (await delivery(conn))["status"] == "sent"


async def test_a_deliverer_goes_on_when_the_database_is_back(
    database_url: str, conn: Connection, acme: HookServer
) -> None:
    async with Wire(database_url) as wire, running(wire.url, acme.named()):
        await ask(conn, "t1")
        await until(lambda: acme.got(1))
        wire.cut()
        await ask(conn, "t2")
        await until(lambda: acme.got(2))
    assert len(set(acme.ids)) == 2


# Whom we speak to


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((address, True) for address in ("8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111")),
        *((address, True) for address in ("::ffff:8.8.8.8", "64:ff9b::808:808", "2001:4860:4860::8888")),
        *((address, False) for address in ("127.0.0.1", "127.8.9.10", "0.0.0.0", "0.1.2.3", "10.0.0.1")),
        *((address, False) for address in ("172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254")),
        *((address, False) for address in ("100.64.0.1", "192.0.0.1", "192.0.2.1", "192.88.99.1", "198.18.0.1")),
        *((address, False) for address in ("168.63.129.16", "192.0.0.192")),
        *((address, False) for address in ("198.51.100.1", "203.0.113.1", "224.0.0.1", "224.0.1.1", "239.1.1.1")),
        *((address, False) for address in ("240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1")),
        *((address, False) for address in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254")),
        *((address, False) for address in ("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::")),
        *((address, False) for address in ("2001:0:1::1", "2001:db8::1", "3fff::1", "5f00::1", "100::1")),
        *((address, False) for address in ("fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254")),
        *((address, False) for address in ("ff02::1", "ff0e::1", "2130706433", "0x7f.1", "127.1", "localhost", "")),
    ],
)
def test_only_addresses_that_the_whole_internet_reaches_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1", "0x7f000001", "[::ffff:127.0.0.1]"])
async def test_an_endpoint_on_our_own_machine_is_not_reached_however_it_is_written(
    conn: Connection, acme: HookServer, sweep: Sweep, host: str
) -> None:
    await ask(conn)
    ours = Receiver(name="acme", url=f"http://{host}:{acme.port}/hooks", secrets=(SECRET,))
    assert await sweep(ours, is_allowed=is_public) == (0, 1)
    assert acme.received == []
    if host in {"127.0.0.1", "localhost"}:
        assert "not a public address" in (await delivery(conn))["error"]


async def test_a_name_of_which_one_address_is_not_allowed_is_not_asked_at_all(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    await ask(conn)
    named = Receiver(name="acme", url=f"http://hooks.example.com:{acme.port}/hooks", secrets=(SECRET,))
    for addresses in (["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"], ["127.0.0.1", "fe80::1"]):
        answers = NameServer(addresses)
        assert await sweep(named, look_up=answers, is_allowed=lambda address: address == "127.0.0.1") == (0, 1)
        await make_due(conn)
    assert acme.received == []
    assert await sweep(named, look_up=NameServer(["127.0.0.1"]), is_allowed=lambda a: a == "127.0.0.1") == (1, 0)


async def test_a_name_that_moves_between_check_and_connection_leads_nowhere_else(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    """DNS rebinding: a public address for the check, and a private one for whoever looks a second time."""
    async with HookServer(host="127.0.0.2", port=acme.port) as private:
        named = Receiver(name="acme", url=f"http://hooks.example.com:{acme.port}/hooks", secrets=(SECRET,))
        answers = NameServer(["127.0.0.1"], ["127.0.0.2"])
        allowed = {"look_up": answers, "is_allowed": lambda address: address == "127.0.0.1"}
        async with deliverer_for([named], **allowed) as deliverer:
            database_url = conn.info.dsn
            await ask(conn, "t1")
            assert await deliverer.sweep(database_url) == (1, 0)
            assert answers.asked == ["hooks.example.com"]
            # The next event is looked up, and checked, anew.
            await ask(conn, "t2")
            assert await deliverer.sweep(database_url) == (0, 1)
        assert (private.received, private.mistakes) == ([], [])
    assert [each.host for each in acme.received] == [f"hooks.example.com:{acme.port}"]


async def test_a_redirect_is_not_followed(conn: Connection, acme: HookServer, ops: HookServer, sweep: Sweep) -> None:
    for status in (301, 302, 303, 307, 308):
        acme.faults.append(Fault(status=status, headers={"Location": ops.url}))
    await ask(conn)
    for _ in range(5):
        assert await sweep(acme.named()) == (0, 1)
        await make_due(conn)
    assert (ops.received, ops.mistakes) == ([], [])


async def test_the_host_that_is_asked_for_is_the_urls_and_not_the_address(conn: Connection, sweep: Sweep) -> None:
    """Otherwise no certificate would fit: the name is in the first message of TLS, in clear."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.close()

    await add_endpoints(conn, ["acme"])
    await ask(conn)
    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        secure = Receiver(name="acme", url=f"https://hooks.example.com:{port}/", secrets=(SECRET,))
        assert await sweep(secure, look_up=NameServer(["127.0.0.1"])) == (0, 1)
    [hello] = heard
    assert hello[:1] == b"\x16"
    assert b"hooks.example.com" in hello


async def test_a_name_server_that_does_not_answer_delays_no_other_endpoint(
    database_url: str, conn: Connection, acme: HookServer, ops: HookServer
) -> None:
    silent = SilentNameServer()
    lost = Receiver(name="acme", url="http://hooks.example.com/", secrets=(SECRET,))
    try:
        async with running(database_url, lost, ops.named("ops"), look_up=silent, call_s=0.2):
            for number in range(10):
                await ask(conn, f"t{number}")
            await until(lambda: ops.got(10))
        assert silent.asked
    finally:
        silent.end()


class NameServer:
    """Answers in this order, and the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, _port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


class SilentNameServer:
    """Answers nothing for `hooks.example.com` until the end."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.asked = False

    def __call__(self, host: str, _port: int) -> Sequence[str]:
        if host == "hooks.example.com":
            self.asked = True
            self._theirs.recv(1)
            return []
        return [host]

    def end(self) -> None:
        self._ours.close()


# Operators


def settings_for(server: HookServer, name: str = "acme") -> dict[str, str]:
    return {
        "WEBHOOK_URLS": f"{name}={server.url}",
        "WEBHOOK_SIGNING_SECRETS": f"{name}={server.secret}",
        "WEBHOOK_ALLOW_PRIVATE": "true",
    }


async def bury(conn: Connection, server: HookServer, sweep: Sweep, *thread_ids: str) -> None:
    """An event of each of these threads is a dead letter."""
    server.usual = Fault(status=500, body=b"broken")
    for thread_id in thread_ids:
        await ask(conn, thread_id)
        await deliveries.spread(conn, "acme")
        await conn.execute("UPDATE webhook_deliveries SET tries = %s WHERE status = 'pending'", (len(RETRIES_S),))
        await sweep(server.named())
    server.usual = Fault()
    server.received.clear()


async def test_what_nobody_configured_costs_an_event_and_nothing_else(conn: Connection) -> None:
    await ask(conn)
    assert await value(conn, "SELECT count(*) FROM events") == 1
    assert await value(conn, "SELECT count(*) FROM webhook_deliveries") == 0


async def test_the_endpoints_are_listed_with_what_waits_and_what_is_dead(
    tmp_path: Path, database_url: str, conn: Connection, acme: HookServer, ops: HookServer, sweep: Sweep
) -> None:
    await bury(conn, acme, sweep, "t1")
    await ask(conn, "t2")
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings_for(acme))
    listed = await terminal.run_meanwhile("webhooks", "list", "--json")
    by_name = {each["endpoint"]: each for each in listed.json}
    found = by_name["acme"]
    oldest = await value(conn, "SELECT created_at FROM events WHERE thread_id = 't2'")
    assert (found["on"], found["waiting"], found["dead_count"], found["configured"]) == (True, 1, 1, True)
    assert datetime.fromisoformat(found["oldest"]) == oldest
    [letter] = found["dead"]
    event_id = await value(conn, "SELECT id FROM events WHERE thread_id = 't1'")
    assert (letter["event"], letter["type"], letter["thread"], letter["error"]) == (
        event_id,
        "approval.requested",
        "t1",
        "answered 500: broken",
    )
    assert (by_name["ops"]["waiting"], by_name["ops"]["configured"]) == (2, False)
    words = (await terminal.run_meanwhile("webhooks", "list")).out
    assert f"acme: on; 1 waiting since {oldest:%Y-%m-%d %H:%M:%S} UTC, 1 dead\n  event {event_id}" in words
    assert "ops: on, not in WEBHOOK_URLS here; 2 waiting" in words


async def test_dead_letters_are_sent_again_under_their_old_ids(
    tmp_path: Path, database_url: str, conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    await bury(conn, acme, sweep, "t1", "t2")
    ids = [f"evt_{row['id']}_acme" for row in await all_rows(conn, "SELECT id FROM events ORDER BY id")]
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings_for(acme))
    done = await terminal.run_meanwhile("webhooks", "resend", "--dead", "--endpoint", "acme")
    assert (done.code, done.out) == (0, "2 to be sent again\n2 sent, 0 not\n")
    assert sorted(acme.ids) == ids
    assert (await state_of(conn)).dead_count == 0


async def test_a_dead_letter_that_is_refused_again_is_said(
    tmp_path: Path, database_url: str, conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    await bury(conn, acme, sweep, "t1")
    acme.usual = Fault(status=500, body=b"still broken")
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings_for(acme))
    done = await terminal.run_meanwhile("webhooks", "resend", "--dead")
    assert (done.code, done.out) == (1, "1 to be sent again\n0 sent, 1 not\n")
    assert "answered 500: still broken" in done.err


async def test_a_dead_letter_that_is_sent_again_has_the_whole_schedule_before_it(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    await bury(conn, acme, sweep, "t1")
    assert await deliveries.resend_dead(conn, by="cli:ann") == 1
    acme.faults.append(Fault(status=500))
    assert await sweep(acme.named()) == (0, 1)
    row = await delivery(conn)
    assert (row["status"], row["tries"], row["wait_s"] < 6) == ("pending", 1, True)
    assert row["attempt"] > 1


async def test_one_event_is_sent_again_to_one_endpoint(
    tmp_path: Path, database_url: str, conn: Connection, acme: HookServer, ops: HookServer, sweep: Sweep
) -> None:
    await ask(conn, "t1")
    await ask(conn, "t2")
    await sweep(acme.named(), ops.named("ops"))
    event_id = await value(conn, "SELECT id FROM events WHERE thread_id = 't1'")
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings_for(acme))
    done = await terminal.run_meanwhile("webhooks", "resend", "--event", str(event_id), "--endpoint", "acme")
    assert (done.code, done.out) == (0, "1 to be sent again\n1 sent, 0 not\n")
    assert acme.ids[2] == acme.ids[0] == f"evt_{event_id}_acme"
    assert len(ops.ids) == 2


async def test_an_event_from_before_an_endpoint_was_heard_of_can_be_sent_to_it(conn: Connection, sweep: Sweep) -> None:
    await ask(conn, "t1")
    await add_endpoints(conn, ["acme"])
    event_id = await value(conn, "SELECT id FROM events")
    async with HookServer() as server:
        assert await sweep(server.named()) == (0, 0)
        await deliveries.resend_event(conn, event_id, "acme", by="cli:ann")
        assert await sweep(server.named()) == (1, 0)


async def test_an_event_that_was_sent_by_hand_first_is_not_spread_again(
    conn: Connection, acme: HookServer, sweep: Sweep
) -> None:
    await ask(conn)
    await deliveries.resend_event(conn, await value(conn, "SELECT id FROM events"), "acme", by="cli:ann")
    assert await sweep(acme.named()) == (1, 0)
    assert await sweep(acme.named()) == (0, 0)


async def test_what_is_not_there_cannot_be_sent_again(conn: Connection, acme: HookServer) -> None:
    await ask(conn)
    with pytest.raises(UnknownEvent):
        await deliveries.resend_event(conn, 4711, "acme", by="cli:ann")
    with pytest.raises(UnknownEndpoint):
        await deliveries.resend_event(conn, await value(conn, "SELECT id FROM events"), "other", by="cli:ann")
    with pytest.raises(UnknownEndpoint):
        await deliveries.resend_dead(conn, "other", by="cli:ann")
    assert await value(conn, "SELECT count(*) FROM webhook_deliveries") == 0


@pytest.mark.parametrize(
    "words",
    [[], ["--event", "1"], ["--dead", "--event", "1"], ["--endpoint", "acme"], ["--event", "0", "--endpoint", "a"]],
    ids=" ".join,
)
def test_half_a_wish_is_a_mistake(tmp_path: Path, words: list[str]) -> None:
    done = Terminal(tmp_path, DATABASE_URL="postgresql://u@127.0.0.1:1/claims").run("webhooks", "resend", *words)
    assert done.code == 2


async def test_delivering_needs_no_slack(tmp_path: Path, database_url: str, conn: Connection, acme: HookServer) -> None:
    await ask(conn)
    acme.faults.append(Fault(status=500))
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings_for(acme))
    failed = await terminal.run_meanwhile("deliver")
    assert (failed.code, failed.out) == (1, "0 sent, 1 not\n")
    await make_due(conn)
    done = await terminal.run_meanwhile("deliver")
    assert (done.code, done.out) == (0, "1 sent, 0 not\n")


async def test_whoever_files_the_first_claim_knows_of_the_endpoints(
    tmp_path: Path, database_url: str, conn: Connection
) -> None:
    async with HookServer() as server:
        terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings_for(server))
        await terminal.run_meanwhile("start", "--thread", "t1", "--amount", "250")
        done = await terminal.run_meanwhile("work", "--once")
        assert (done.code, server.types) == (0, ["approval.requested"])


@pytest.mark.parametrize("service", ["bot", "work"])
async def test_services_deliver_and_say_that_they_do(
    tmp_path: Path, database_url: str, conn: Connection, acme: HookServer, service: str
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, PORT=str(free_port()), **settings_for(acme))
    async with terminal.service(service) as running_service:
        await running_service.until(lambda: is_here(conn))
        await ask(conn)
        await running_service.until(lambda: acme.got(1))
        resent = await terminal.run_meanwhile(
            "webhooks", "resend", "--event", str(await value(conn, "SELECT id FROM events")), "--endpoint", "acme"
        )
        # It is told, and does it.
        assert (resent.code, resent.out) == (0, "1 to be sent again\n")
        await running_service.until(lambda: acme.got(2))
        assert (await running_service.stop()).code == 0


async def is_here(conn: Connection) -> bool:
    return await is_present(conn, Lock.WEBHOOKS)


# Settings

URLS = {"WEBHOOK_URLS": "acme=https://acme.example.com/hooks?a=b,ops=https://ops.example.com"}
SECRETS = {"WEBHOOK_SIGNING_SECRETS": f"acme={SECRET},acme={OLD_SECRET},ops={OTHER_SECRET}"}


def set_all(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, text in values.items():
        monkeypatch.setenv(name, text)


def test_endpoints_are_urls_with_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, URLS | SECRETS)
    assert receivers_of(read_settings()) == (
        Receiver(name="acme", url="https://acme.example.com/hooks?a=b", secrets=(SECRET, OLD_SECRET)),
        Receiver(name="ops", url="https://ops.example.com", secrets=(OTHER_SECRET,)),
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (URLS, "WEBHOOK_SIGNING_SECRETS has no secret for acme, ops"),
        (SECRETS, "WEBHOOK_URLS has no URL for acme, ops"),
        (SECRETS | {"WEBHOOK_URLS": "acme=https://a.example.com"}, "WEBHOOK_URLS has no URL for ops"),
        (SECRETS | {"WEBHOOK_URLS": "https://a.example.com"}, "write ENDPOINT=https"),
        (SECRETS | {"WEBHOOK_URLS": "Acme=https://a.example.com"}, "write ENDPOINT=https"),
        (SECRETS | {"WEBHOOK_URLS": "acme=ftp://a.example.com"}, "write ENDPOINT=https"),
        (SECRETS | {"WEBHOOK_URLS": "acme=https://"}, "write ENDPOINT=https"),
        (SECRETS | {"WEBHOOK_URLS": "acme=https://me:secret@a.example.com"}, "write ENDPOINT=https"),
        (SECRETS | {"WEBHOOK_URLS": "acme=https://a.example.com:99999"}, "write ENDPOINT=https"),
        (SECRETS | {"WEBHOOK_URLS": "acme=https://[::1"}, "write ENDPOINT=https"),
        (SECRETS | {"WEBHOOK_URLS": "acme=https://a.example.com/a b"}, "write ENDPOINT=https"),
        (SECRETS | {"WEBHOOK_URLS": "acme=https://a.example.com,acme=https://b.example.com"}, "acme comes twice"),
        (SECRETS | {"WEBHOOK_URLS": "acme=http://a.example.com,ops=https://b.example.com"}, "acme is not https"),
        (URLS | {"WEBHOOK_SIGNING_SECRETS": "acme=secret"}, "whsec_"),
        (URLS | {"WEBHOOK_SIGNING_SECRETS": f"acme={SECRET},ops={SECRET}"}, "share a secret"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_said_and_no_secret_shown(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], text: str
) -> None:
    set_all(monkeypatch, given)
    with pytest.raises(SettingError, match=text) as wrong:
        read_settings()
    assert "WEBHOOK_" in str(wrong.value)
    assert not any(secret in str(wrong.value) for secret in (SECRET, OLD_SECRET, "me:secret"))


def test_http_is_for_development(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"WEBHOOK_URLS": "acme=http://127.0.0.1:4010", "WEBHOOK_SIGNING_SECRETS": f"acme={SECRET}"}
    set_all(monkeypatch, given | {"WEBHOOK_ALLOW_PRIVATE": "true"})
    assert [each.url for each in receivers_of(read_settings())] == ["http://127.0.0.1:4010"]


async def test_private_addresses_are_for_development(
    tmp_path: Path, database_url: str, conn: Connection, acme: HookServer
) -> None:
    await ask(conn)
    given = settings_for(acme) | {"WEBHOOK_URLS": f"acme=https://127.0.0.1:{acme.port}/", "WEBHOOK_ALLOW_PRIVATE": ""}
    done = await Terminal(tmp_path, DATABASE_URL=database_url, **given).run_meanwhile("deliver")
    assert (done.code, done.out) == (1, "0 sent, 1 not\n")
    assert "not a public address" in (await delivery(conn))["error"]


# The worked example


async def test_the_external_approver_of_the_docs_approves_small_claims_and_leaves_large_ones(
    tmp_path: Path, database_url: str, conn: Connection
) -> None:
    bot_port, its_port = free_port(), free_port()
    example = {
        "PORT": str(its_port),
        "CLAIM_FLOW_URL": f"http://127.0.0.1:{bot_port}",
        "EVENTS_SECRET": SECRET,
        "DECISIONS_SECRET": OTHER_SECRET,
    }
    terminal = Terminal(
        tmp_path,
        DATABASE_URL=database_url,
        PORT=str(bot_port),
        STAND_BY="1",
        APPROVERS="webhook:acme:carol",
        WEBHOOK_URLS=f"acme=http://127.0.0.1:{its_port}/",
        WEBHOOK_SIGNING_SECRETS=f"acme={SECRET}",
        WEBHOOK_ALLOW_PRIVATE="true",
        WEBHOOK_SECRETS=f"acme={OTHER_SECRET}",
        WEBHOOK_APPROVERS="acme=carol",
    )
    approver = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "docs" / "external_approver.py"),
        env={"PATH": os.environ["PATH"], **example},
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with terminal.service("serve") as serving:
            await serving.until(lambda: is_here(conn))
            await terminal.run_meanwhile("start", "--thread", "small", "--amount", "250")
            await terminal.run_meanwhile("start", "--thread", "large", "--amount", "2500")

            async def is_paid() -> bool:
                return bool(await value(conn, "SELECT status = 'paid' FROM threads WHERE thread_id = 'small'"))

            async def all_is_told() -> bool:
                return bool(await value(conn, "SELECT bool_and(status = 'sent') FROM webhook_deliveries"))

            await serving.until(is_paid)
            await serving.until(all_is_told)
        decisions = await all_rows(conn, "SELECT person, verdict, door, reason FROM decisions")
        assert decisions == [
            {"person": "webhook:acme:carol", "verdict": "approve", "door": "webhook", "reason": "up to 500 USD"}
        ]
        assert await value(conn, "SELECT status FROM threads WHERE thread_id = 'large'") == "waiting"
    finally:
        approver.send_signal(signal.SIGTERM)
        await approver.wait()


def test_the_external_approver_of_the_docs_is_short() -> None:
    code = (ROOT / "docs" / "external_approver.py").read_text().split("async def receive", 1)[1]
    assert len(code.splitlines()) <= 35
