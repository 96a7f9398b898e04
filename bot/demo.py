"""The whole product in a minute: a small claim is paid, a large one waits for a click in a Slack on this machine.

Everything is real but Slack, which runs locally, and everything is gone at the end: the database stands in a temporary
folder. Each step is a command that a user could type, run as one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import aiohttp
import click

from bot.local_slack import (
    CHANNEL,
    LocalSlackMissing,
    find_binary,
    free_port,
    running_local_slack,
    settings_for,
)
from bot.server import run_services, stop_on_signals
from flow import threads
from flow.approvals import approvals_of
from flow.database import connect, database_url, listen, wait_for_bell
from flow.embedded import stop_embedded
from flow.errors import FlowError
from flow.model import Thread
from flow.notices import messages_of
from flow.settings import Settings, read_settings

_SCRIPT = Path(__file__).parent.parent / "claim_flow.py"
_APPROVER = "U01ALICE"


async def run_demo(*, click_too: bool) -> None:
    """Show it until Ctrl-C; with `click_too` the demo presses Approve itself and ends."""
    try:
        find_binary()
    except LocalSlackMissing as exc:
        click.echo(f"No local Slack: {exc}. Going on with the command line alone.")
        await _show_without_slack()
        return
    port = free_port()
    with running_local_slack(request_url=f"http://127.0.0.1:{port}/slack/events") as (page, _pid):
        os.environ.update(settings_for(page), APPROVERS=_APPROVER, HOST="127.0.0.1", PORT=str(port))
        await _show_with_slack(page, click_too=click_too)


@contextmanager
def without_settings() -> Iterator[None]:
    """Surroundings of the demo's own: no setting, no .env, and a database in a folder that is removed at the end."""
    # Their names mean the same in small letters.
    for name in [name for name in os.environ if name.lower() in Settings.model_fields]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="claim-flow-demo-", ignore_cleanup_errors=True) as folder, chdir(folder):
        home = Path(folder) / "home"
        os.environ["CLAIM_FLOW_HOME"] = str(home)
        try:
            yield
        finally:
            stop_embedded(home)


async def _show_without_slack() -> None:
    await _type("start --thread t0 --amount 20")
    await _type("start --thread t1 --amount 250")
    click.echo("\nAnother process approves it; once more changes nothing:")
    await _type("resume --thread t1 --approve")
    await _type("resume --thread t1 --approve")
    await _type("list")


async def _show_with_slack(page: str, *, click_too: bool) -> None:
    stop = stop_on_signals()
    # It warns about settings that it is right not to use.
    logging.getLogger("slack_bolt").setLevel(logging.ERROR)
    await _type("setup")
    settings = read_settings()
    url = database_url(settings)
    async with asyncio.TaskGroup() as group:
        services = group.create_task(run_services(settings, url, stop, web=True, worker=True))
        story = group.create_task(_tell(url, page, stop, click_too=click_too))
        stopped = group.create_task(stop.wait())
        await asyncio.wait({services, story, stopped}, return_when=asyncio.FIRST_COMPLETED)
        story.cancel()
        stop.set()


async def _tell(url: str, page: str, stop: asyncio.Event, *, click_too: bool) -> None:
    await _type("start --thread t0 --amount 20")
    await _type("start --thread t1 --amount 250 --payee 'Brown & Co' --note 'Three chairs for the new office'")
    interrupt_id = await _wait_for_card(url)
    if click_too:
        click.echo(f"\nAlice presses Approve in the local Slack ({page}).")
        await _press_approve(url, page, interrupt_id)
    else:
        click.echo(f"\nNow open {click.style(page, bold=True)} as Alice, and press Approve in the channel approvals.")
        click.echo(f"Or, in another terminal: {_hint()} uv run claim_flow.py resume --thread t1 --approve")
    thread = await _wait_until_over(url)
    await _type("show --thread t1")
    if thread.status == "paid":
        click.echo("\nApproving it again, from another process, pays nothing more:")
        await _type("resume --thread t1 --approve")
    else:
        click.echo("\nNothing is paid, and an approval would come too late: the first decision stands.")
    await _type("list")
    if not click_too:
        click.echo(f"\nThe card in {page} shows it too. Ctrl-C ends the demo.")
        await stop.wait()


async def _type(command: str) -> None:
    """Run one of our commands in a process of its own, as if it had been typed. Raises FlowError if it fails."""
    click.echo(f"\n$ uv run claim_flow.py {command}")
    # In a session of its own: a Ctrl-C in the terminal is ours to handle.
    process = await asyncio.create_subprocess_exec(
        sys.executable, _SCRIPT, *shlex.split(command), start_new_session=True
    )
    try:
        await process.wait()
    except asyncio.CancelledError:
        # With whatever it has started: it would go on without us, on a database that we remove.
        os.killpg(process.pid, signal.SIGTERM)
        await process.wait()
        raise
    if process.returncode:
        raise FlowError(f"the demo's command `{command}` failed with exit code {process.returncode}")


async def _wait_for_card(url: str) -> str:
    """The interrupt id of the claim that waits, once its card stands in Slack."""
    async with await connect(url, "door") as conn:
        await listen(conn)
        while True:
            for approval in (await approvals_of(conn, ["t1"]))["t1"]:
                if await messages_of(conn, approval.interrupt_id):
                    return approval.interrupt_id
            await wait_for_bell(conn, timeout_s=0.2)


async def _wait_until_over(url: str) -> Thread:
    async with await connect(url, "door") as conn:
        await listen(conn)
        while not (thread := await threads.thread_of(conn, "t1")).over:
            await wait_for_bell(conn, timeout_s=0.2)
        return thread


async def _press_approve(url: str, page: str, interrupt_id: str) -> None:
    """What the page does when Alice presses the button: the local Slack sends us the signed request."""
    async with await connect(url, "door") as conn:
        [(_channel, ts)] = await messages_of(conn, interrupt_id)
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.get(f"{page}/_control/messages/{CHANNEL}") as answer:
            [message] = [m for m in (await answer.json())["messages"] if m["ts"] == ts]
        [(block_id, button)] = [
            (block["block_id"], element)
            for block in message["blocks"]
            for element in block.get("elements", ())
            if element.get("action_id") == "approve"
        ]
        action = {"type": "button", "action_id": "approve", "value": button["value"], "block_id": block_id}
        body = {"user": _APPROVER, "channel": CHANNEL, "messageTs": ts, "action": action}
        await (await session.post(f"{page}/_control/interact", json=body)).release()


def _hint() -> str:
    return f"CLAIM_FLOW_HOME={os.environ['CLAIM_FLOW_HOME']}"
