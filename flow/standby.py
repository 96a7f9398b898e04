"""Fresh processes, made in advance: each drives exactly one thread and has never seen another.

A zygote imports and warms everything once, opens nothing, and forks a child whenever it is asked. A child connects,
rehearses on a thread of its own (rolled back), says that it is ready, and waits for its one thread. Where threads wait
for children it does not rehearse: that takes longer than it saves, and only a person who waits has something of it.

    worker ──ctl socket──> zygote ──fork──> child
       └───────────── socketpair ─────────────┘      "ready", the job, the report; its end means death, both ways

The worker's half is `Zygote` and `Standby`; `python -m flow.standby FD` is the zygote's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

from flow.log import concerning, trace_id

if TYPE_CHECKING:
    from flow.database import Connection
    from flow.drive import Findings, Outcome
    from flow.flows import Flows

    class DriveOne(Protocol):
        """`drive`, with everything that is the same for all threads."""

        def __call__(self, conn: Connection, thread_id: str, *, findings: Findings) -> Awaitable[Outcome]: ...


log = logging.getLogger(__name__)

# Weighs about a tenth of the bot: a click goes first on a busy machine, and a drive is not starved.
_NICENESS = 10

# What the zygote is told.
_REHEARSED, _AS_IT_IS = b"r", b"a"

# A new interpreter imports LangGraph in 1 to 4 s; a loaded machine may need far longer.
_READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """How one drive ended: `outcome` as of `drive`, with the `reason` if it is stuck; or `failed`: a step, which will
    be tried again; or `lost`: the child could not work, or died. The rest is what `drive` calls its findings."""

    outcome: str | None = None
    reason: str | None = None
    failed: str | None = None
    lost: str | None = None
    taken_over: bool = False
    payment: str | None = None
    decided_to_paid_s: float | None = None


class Standby:
    """A child that is ready for one thread of one of its `flows` (their keys)."""

    def __init__(
        self, pid: int, flows: tuple[str, ...], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid, self.flows, self._writer = pid, flows, writer
        # Its report; an empty one if it dies, also before it was given anything to do.
        self.ended = asyncio.ensure_future(reader.readline())

    async def drive(self, thread_id: str, *, timeout_s: float) -> Report:
        """Have it drive this thread, to its end, its next approval, or its death after `timeout_s`."""
        try:
            self._writer.write(f"{thread_id} {trace_id()}\n".encode())
            async with asyncio.timeout(timeout_s):
                line = await self.ended
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            return Report(lost=f"process {self.pid} took longer than {timeout_s:g} s and was killed")
        except (ConnectionError, ValueError) as exc:
            # ValueError: a line that never ends.
            return Report(lost=f"process {self.pid} died: {exc}")
        return Report(**json.loads(line)) if line else Report(lost=f"process {self.pid} died")

    def close(self) -> None:
        """Let it go: the end of its socket ends it."""
        self.ended.cancel()
        self._writer.close()


class Zygote:
    """The worker's handle on its zygote."""

    def __init__(self, process: subprocess.Popen[bytes], ctl: socket.socket) -> None:
        self._process, self._ctl = process, ctl

    @classmethod
    def start(cls, url: str) -> Zygote:
        """Start one for this database. It is ready once its first child is."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "flow.standby", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"DATABASE_URL": url, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # A Ctrl-C in the terminal is the worker's to handle: drives under way may end. A group of its own, and
                # not a session: Linux would then give both the same share of the processor, whatever their niceness.
                process_group=0,
            )
        return cls(process, ours)

    async def fork(self, *, rehearsed: bool) -> Standby:
        """A new stand-by. Raises ConnectionError if the zygote or the child died."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._ctl, [_REHEARSED if rehearsed else _AS_IT_IS], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                ready = await reader.readline()
        except TimeoutError:
            # It lives and does nothing: another one is needed.
            self._process.kill()
            self._process.wait()
            ready = b""
        if not ready:
            writer.close()
            raise ConnectionError("a stand-by died before it was ready")
        said = json.loads(ready)
        return Standby(said["pid"], tuple(said["flows"]), reader, writer)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it and wait for its end."""
        self._ctl.close()
        # It has nothing to save, and one that stands still would not hear anything softer.
        self._process.kill()
        self._process.wait()


# The zygote's half


def _run_zygote(ctl: socket.socket) -> NoReturn:
    _die_with_parent()
    # A person waits for the bot's answer to a click; what comes after it can wait a few milliseconds more.
    os.nice(_NICENESS)
    from flow.assess import adviser_of
    from flow.database import database_url
    from flow.drive import drive
    from flow.errors import SettingError
    from flow.flows import load_flows
    from flow.log import hider_of_content, log_to_stderr
    from flow.policy import policy_of
    from flow.providers import provider_of
    from flow.settings import read_settings

    settings = read_settings()
    # The worker tells how each drive ended.
    log_to_stderr(settings, least=logging.WARNING)
    url, flows = database_url(settings), load_flows(settings.flow_modules)
    if threading.active_count() != 1:
        started = ", ".join(thread.name for thread in threading.enumerate()[1:])
        raise SettingError(f"FLOWS: a module starts threads when it is imported ({started}): start nothing there")
    adviser = adviser_of(settings)
    if adviser is not None:
        import openai  # noqa: F401 (a second that no child should spend)
    asyncio.run(_with_connection(url, rehearse))
    drive_one = partial(
        drive,
        flows=flows,
        policy=policy_of(settings),
        adviser=adviser,
        provider=provider_of(settings),
        slice_s=settings.drive_slice,
        spans=settings.spans,
        hide=hider_of_content(settings),
    )

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Whoever ends the whole group means the worker, which lets drives under way end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    if threading.active_count() != 1:
        raise RuntimeError(f"a fork would lose these threads: {threading.enumerate()}")
    while True:
        message, fds, _flags, _address = socket.recv_fds(ctl, 1, 1)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            ctl.close()
            _run_child(socket.socket(fileno=fds[0]), url, flows, drive_one, rehearsed=message == _REHEARSED)
        os.close(fds[0])


def _run_child(sock: socket.socket, url: str, flows: Flows, drive_one: DriveOne, *, rehearsed: bool) -> NoReturn:
    """Never returns: inherited exit hooks must not run twice."""
    status = 1
    try:
        _die_with_parent()
        asyncio.run(_with_connection(url, lambda conn: _serve_one(conn, sock, flows, drive_one, rehearsed=rehearsed)))
        status = 0
    except Exception as exc:  # noqa: BLE001 (nothing above us may run in a forked child)
        log.error("stand-by %d: %s: %s", os.getpid(), type(exc).__name__, exc)  # noqa: TRY400 (its cause is outside)
    finally:
        os._exit(status)


async def _with_connection(url: str, work: Callable[[Connection], Awaitable[None]]) -> None:
    from flow.database import connect

    async with await connect(url, "drive") as conn:
        await work(conn)


async def _serve_one(
    conn: Connection, sock: socket.socket, flows: Flows, drive_one: DriveOne, *, rehearsed: bool
) -> None:
    from flow.database import AWAY
    from flow.drive import Findings
    from flow.errors import DriveFailed
    from flow.threads import thread_of

    if rehearsed:
        await rehearse(conn)
    sock.sendall(json.dumps({"pid": os.getpid(), "flows": flows.keys}).encode() + b"\n")
    loop = asyncio.get_running_loop()
    # A connection that says something while nobody asks is being closed; a stand-by without one is none. (After a
    # reload of the server's settings it may say that too: then a stand-by is replaced for nothing.)
    loop.add_reader(conn.fileno(), os._exit, 3)
    thread_id, _, trace_id = (await _job(sock)).partition(" ")
    loop.remove_reader(conn.fileno())
    findings = Findings()
    with concerning(thread=thread_id, trace_id=trace_id):
        try:
            report: dict[str, str | None] = {"outcome": await drive_one(conn, thread_id, findings=findings)}
            if report["outcome"] in ("stuck", "unavailable"):
                report["reason"] = (await thread_of(conn, thread_id)).reason
        except DriveFailed as exc:
            report = {"failed": exc.reason}
        except AWAY as exc:
            report = {"lost": f"the connection broke: {str(exc).strip()}"}
    sock.sendall(json.dumps(report | asdict(findings)).encode() + b"\n")


async def _job(sock: socket.socket) -> str:
    """What the worker sends: thread id and trace id. From here on a thread watches the socket: its end is ours."""
    loop = asyncio.get_running_loop()
    job: asyncio.Future[str] = loop.create_future()

    def watch() -> None:
        with sock.makefile("rb") as lines:
            if thread_id := lines.readline():
                loop.call_soon_threadsafe(job.set_result, thread_id.decode().strip())
                lines.read()
        # The worker is gone or has let us go. The drive's session dies with us, and the thread is free.
        os._exit(9)

    threading.Thread(target=watch, daemon=True).start()
    return await job


async def rehearse(conn: Connection) -> None:
    """Drive a claim of our own through pause, decision and payment, and roll it all back.

    It warms imports, types, prepared statements and the server's caches: 16 ms become 10 for the thread that counts.
    """
    from flow.approvals import approvals_of, decide
    from flow.claims import FLOW
    from flow.drive import drive
    from flow.flows import Flows
    from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, Claim, Person, Verdict
    from flow.policy import OneTier
    from flow.threads import insert_thread

    thread_id = f"rehearsal-{uuid.uuid4()}"
    actor = Person(key="cli:rehearsal", name="rehearsal", names=frozenset({"cli:rehearsal"}), trusted=True)
    always_ask, flows = OneTier(approvers=(), limits={}), Flows([FLOW])
    claim = Claim(amount=Decimal("1.00"), currency="USD").as_input()
    # By hand: psycopg forgets its prepared statements at a rollback that it sees, and they are half of the warmth.
    await conn.execute("BEGIN", prepare=False)
    await insert_thread(
        conn,
        thread_id=thread_id,
        flow=CLAIM_FLOW,
        flow_version=CLAIM_FLOW_VERSION,
        input=claim,
        requested_by=actor.key,
    )
    await drive(conn, thread_id, flows=flows, policy=always_ask)
    [approval] = (await approvals_of(conn, [thread_id]))[thread_id]
    await decide(conn, approval.interrupt_id, actor, Verdict(verdict="approve", door="cli"))
    outcome = await drive(conn, thread_id, flows=flows, policy=always_ask)
    assert outcome == "over", outcome
    conn.pgconn.exec_(b"ROLLBACK")


def _die_with_parent() -> None:
    """Ask the kernel to kill us when the parent dies (Linux); elsewhere the socket's end does it alone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _main() -> None:
    from flow.database import AWAY
    from flow.errors import FlowError

    try:
        _run_zygote(socket.socket(fileno=int(sys.argv[1])))
    except (FlowError, *AWAY) as exc:
        sys.exit(f"no stand-by can be made: {str(exc).strip()}")


if __name__ == "__main__":
    _main()
