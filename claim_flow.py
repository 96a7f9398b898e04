"""The command line. Each command imports what it needs when it runs: LangGraph alone costs a second.

Exit codes: 0 done or waiting, 1 refused or failed, 2 usage. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import getpass
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flow.errors import FlowError

if TYPE_CHECKING:
    from slack_sdk.web.async_client import AsyncWebClient

    from flow.database import Connection
    from flow.delegations import Delegation
    from flow.model import Approval, Person, Thread
    from flow.settings import Settings
    from flow.show import Story

_thread = click.option("--thread", "thread_id", required=True, metavar="ID", help="The thread's id.")
_workspace = click.option("--workspace", metavar="ID", help="In which workspace, where there are many.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def cli() -> None:
    """Claims that pause for a person, survive anything, and are paid exactly once."""


@cli.command()
@_thread
@click.option("--amount", metavar="N", help="What to pay, such as 250 or 250.00.")
@click.option("--currency", metavar="ISO", help="ISO 4217 code.  [default: USD]")
@click.option("--payee", metavar="WHO", help="Who is paid.")
@click.option("--note", metavar="TEXT", help="What it is for.")
@click.option("--by", default="", metavar="WHO", help="Who asks, such as U01ALICE.  [default: cli:USER]")
@click.option("--flow", "flow_name", metavar="NAME", help="Start this flow instead, with its --input.")
@click.option("--input", "given", metavar="JSON", help="Its input, a JSON object; - reads it from stdin.")
@_workspace
@_json
def start(
    thread_id: str,
    amount: str | None,
    currency: str | None,
    payee: str | None,
    note: str | None,
    by: str,
    flow_name: str | None,
    given: str | None,
    workspace: str | None,
    as_json: bool,
) -> None:
    """File a claim, or start another flow, and take it as far as it can go now."""
    from flow import inputs
    from flow.model import CLAIM_FLOW

    inputs.parse_thread_id(thread_id)
    user = _user()
    requested_by = inputs.parse_text("--by", by, inputs.MAX_NAME, lines=False) or user
    said = {"amount": amount, "currency": currency, "payee": payee, "note": note}
    fields = {name: value for name, value in said.items() if value is not None}
    if given is not None and fields:
        raise click.UsageError("say --input, or the fields of a claim, not both")
    if flow_name in (None, CLAIM_FLOW) and given is None and amount is None:
        raise click.UsageError("Missing option '--amount'.")
    if flow_name not in (None, CLAIM_FLOW) and given is None:
        raise click.UsageError(f"the flow {flow_name} wants its --input")
    filled = fields if given is None else inputs.parse_object(sys.stdin.read() if given == "-" else given)

    async def run(settings: Settings) -> None:
        from flow.starting import filed
        from flow.threads import insert_thread, wake
        from flow.workspaces import workspace_meant

        where = workspace_meant(workspace, many=settings.many_workspaces)
        new = filed(settings, flow_name or CLAIM_FLOW, filled)
        async with _database(settings, acts=True) as (url, conn):
            thread = await insert_thread(
                conn,
                thread_id=thread_id,
                flow=new.flow,
                flow_version=new.flow_version,
                input=new.input,
                requested_by=requested_by,
                filed_by=user,
                workspace=where,
            )
            if thread.status == "unavailable" and thread.flow_version == new.flow_version:
                # Here it is.
                async with conn.transaction():
                    await wake(conn, thread_id)
            await _advance_and_report(settings, url, conn, thread_id, as_json=as_json)

    _run(run)


@cli.command()
@_thread
@click.option("--approve", is_flag=True, help="Let it go on.")
@click.option("--reject", is_flag=True, help="End it unpaid.")
@click.option("--interrupt", "interrupt_id", metavar="ID", help="Which request.  [default: the one that waits]")
@click.option("--reason", default="", metavar="TEXT", help="Why; shown and stored.")
@click.option("--answer", metavar="JSON", help="What else there is to say: an option, or what becomes of each action.")
@click.option("--by", default="", metavar="WHO", help="A note of who decided; recorded beside your user name.")
@_json
def resume(
    thread_id: str,
    approve: bool,
    reject: bool,
    interrupt_id: str | None,
    reason: str,
    answer: str | None,
    by: str,
    as_json: bool,
) -> None:
    """Decide what a thread waits for, and take it as far as it can go now."""
    from flow import inputs
    from flow.model import Verdict

    if approve == reject:
        raise click.UsageError("say --approve or --reject")
    inputs.parse_thread_id(thread_id)
    if interrupt_id is not None:
        inputs.parse_interrupt_id(interrupt_id)
    said = Verdict(
        verdict="approve" if approve else "reject",
        door="cli",
        reason=inputs.parse_text("--reason", reason, inputs.MAX_NOTE),
        answer=None if answer is None else inputs.parse_object(answer),
    )
    note = inputs.parse_text("--by", by, inputs.MAX_NAME, lines=False)
    person = _typist(note)

    async def run(settings: Settings) -> None:
        from flow.approvals import decide

        async with _database(settings, acts=True) as (url, conn):
            approval = await _approval_to_decide(conn, thread_id, interrupt_id)
            await decide(conn, approval.interrupt_id, person, said)
            await _advance_and_report(settings, url, conn, thread_id, as_json=as_json)

    _run(run)


@cli.command()
@_thread
@click.option("--amount", required=True, metavar="N", help="What to ask for instead, in the claim's currency.")
@click.option("--interrupt", "interrupt_id", metavar="ID", help="Which request.  [default: the one that waits]")
@click.option("--reason", default="", metavar="TEXT", help="Why; shown and stored.")
@_json
def change(thread_id: str, amount: str, interrupt_id: str | None, reason: str, as_json: bool) -> None:
    """Ask for another amount instead of the one that waits: the request is made anew, and approved anew.

    The same again is a success that changes nothing.
    """
    from flow import inputs

    inputs.parse_thread_id(thread_id)
    if interrupt_id is not None:
        inputs.parse_interrupt_id(interrupt_id)
    why, person = inputs.parse_text("--reason", reason, inputs.MAX_NOTE), _typist()

    async def run(settings: Settings) -> None:
        from flow.changes import change_amount

        async with _database(settings, acts=True) as (url, conn):
            approval = await _approval_to_decide(conn, thread_id, interrupt_id, whole_claim=True)
            await change_amount(
                conn, approval.interrupt_id, person, amount=amount, reason=why, door="cli", request_hash=None
            )
            await _advance_and_report(settings, url, conn, thread_id, as_json=as_json)

    _run(run)


@cli.command()
@_thread
@click.option("--reason", default="", metavar="TEXT", help="Why; shown and stored.")
@_json
def withdraw(thread_id: str, reason: str, as_json: bool) -> None:
    """Take back what a thread waits for: nobody needs to decide it, and a claim ends unpaid."""
    from flow import inputs

    inputs.parse_thread_id(thread_id)
    why, person = inputs.parse_text("--reason", reason, inputs.MAX_NOTE), _typist()

    async def run(settings: Settings) -> None:
        from flow import changes

        async with _database(settings, acts=True) as (url, conn):
            await changes.withdraw(conn, thread_id, person, why)
            await _advance_and_report(settings, url, conn, thread_id, as_json=as_json)

    _run(run)


@cli.command()
@_thread
@_json
def retry(thread_id: str, as_json: bool) -> None:
    """Drive a thread that is stuck or put off once more, now: when what stopped it is mended."""
    from flow import inputs

    inputs.parse_thread_id(thread_id)
    user = _user()

    async def run(settings: Settings) -> None:
        from flow import threads

        async with _database(settings, acts=True) as (url, conn):
            await threads.retry(conn, thread_id, by=user)
            await _advance_and_report(settings, url, conn, thread_id, as_json=as_json)

    _run(run)


@cli.command()
@_thread
@_json
def show(thread_id: str, as_json: bool) -> None:
    """Everything that is known of one thread."""
    from flow import inputs

    inputs.parse_thread_id(thread_id)

    async def run(settings: Settings) -> None:
        from flow.show import print_story

        async with _database(settings) as (_url, conn):
            story = await _story(conn, thread_id)
        if as_json:
            _print_json(story.as_json())
        else:
            print_story(story)

    _run(run)


@cli.command()
@_thread
@_json
def trace(thread_id: str, as_json: bool) -> None:
    """How long each step of one thread took, and what waited for whom."""
    from flow import inputs

    inputs.parse_thread_id(thread_id)

    async def run(settings: Settings) -> None:
        from flow.show import print_tree
        from flow.trace import tree_of

        async with _database(settings) as (_url, conn):
            tree = await tree_of(conn, thread_id)
        if as_json:
            _print_json(tree.as_json())
        else:
            print_tree(tree)

    _run(run)


@cli.command("list")
@click.option("--status", metavar="S", help="Only threads with this status.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most this many.")
@_workspace
@_json
def list_(status: str | None, limit: int, workspace: str | None, as_json: bool) -> None:
    """The newest threads."""
    from flow.model import STATUSES

    if status is not None and status not in STATUSES:
        raise click.UsageError(f"--status is one of {', '.join(STATUSES)}")

    async def run(settings: Settings) -> None:
        from flow.show import print_list, stories_of
        from flow.threads import latest_threads
        from flow.workspaces import of_workspace

        async with _database(settings) as (_url, conn):
            named = await _named_workspace(settings, conn, workspace) if workspace else None
            found = await latest_threads(conn, status=status, limit=limit, only=of_workspace(named))
            stories = await stories_of(conn, found)
        if as_json:
            _print_json([story.as_json() for story in stories])
        else:
            print_list(stories)

    _run(run)


@cli.command()
@click.option("--amount", metavar="N", help="Of a claim; without it every tier is shown.")
@click.option("--currency", default="USD", show_default=True, metavar="ISO", help="ISO 4217 code.")
@click.option("--workspace", metavar="ID", help="In this one of several workspaces.")
@_json
def policy(amount: str | None, currency: str, workspace: str | None, as_json: bool) -> None:
    """Who must approve a claim, in which order."""
    from flow import inputs

    claim = inputs.parse_claim(amount=amount, currency=currency) if amount is not None else None

    async def run(settings: Settings) -> None:
        from dataclasses import asdict

        from flow.policy import in_words, policy_of
        from flow.workspaces import policy_in

        rules = policy_of(settings)
        if workspace is not None:
            async with _database(settings) as (_url, conn):
                rules = await policy_in(conn, workspace, rules)
        tiers = [rules.tier(name) for name in rules.names] if claim is None else rules.tiers_of(claim)
        if as_json:
            _print_json([asdict(tier) for tier in tiers])
        for tier in () if as_json else tiers:
            click.echo(in_words(tier))
        if not tiers and not as_json:
            click.echo("nobody: it is paid at once, unless a model doubts it")

    _run(run)


@cli.command()
def serve() -> None:
    """Bot, worker and clock in one process: all that a small team needs."""
    _serve(web=True, worker=True)


@cli.command()
def bot() -> None:
    """The web server that Slack talks to, and the delivery of messages. Run as many as you like."""
    _serve(web=True, worker=False)


@cli.command()
@click.option("--once", is_flag=True, help="Drive everything that is due, deliver, and exit.")
def work(once: bool) -> None:
    """Drive due threads, each in a fresh process, and deliver messages. Run as many as you like."""
    if not once:
        _serve(web=False, worker=True)
        return

    async def run(settings: Settings) -> None:
        from flow.database import check_locks
        from flow.log import log_to_stderr
        from flow.retention import Keep
        from flow.worker import Worker

        log_to_stderr(settings)
        async with _database(settings, checkpoints=True, acts=True) as (url, conn):
            await check_locks(url)
            keep = Keep.of(settings)
            worker = Worker(url, drive_timeout_s=settings.drive_timeout, stand_by=settings.stand_by, keep=keep)
            await worker.run_once()
            await _deliver(settings, conn)
            await _deliver_webhooks(settings, url)
            await _send_traces(settings, url)
            await worker.tidy()

    _run(run)


@cli.command()
def deliver() -> None:
    """Send what waits to be sent, and try again what Slack or a mail server refused."""

    async def run(settings: Settings) -> None:
        from flow import exports, mails, notices
        from flow.log import log_to_stderr

        log_to_stderr(settings)
        async with _database(settings) as (url, conn):
            await exports.keep_targets(conn, settings.trace_targets)
            if not any((settings.slack_is_on, settings.smtp_url, settings.webhook_url_of, settings.trace_targets)):
                raise FlowError(
                    "Slack is off: see SLACK_BOT_TOKEN and what belongs to it in .env.example; so are SMTP_URL,"
                    " WEBHOOK_URLS and traces"
                )
            if settings.slack_is_on:
                await notices.retry_failed(conn)
            if settings.smtp_url:
                await mails.retry_mails(conn)
            counts = (
                await _deliver(settings, conn, within_s=300.0),
                await _deliver_webhooks(settings, url, within_s=300.0),
                await _send_traces(settings, url, within_s=300.0),
            )
        _report_sent(sum(sent for sent, _ in counts), sum(failed for _, failed in counts))

    _run(run)


@cli.command()
def setup() -> None:
    """Make or update the tables. Every other command that needs them does this too."""

    async def run(settings: Settings) -> None:
        async with _database(settings, checkpoints=True) as (_url, conn):
            click.echo(f"the database {conn.info.dbname} is ready (Postgres {conn.info.server_version // 10000})")

    _run(run)


@cli.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option(
    "--older-than",
    metavar="TIME",
    help="What ended longer ago, such as 7d.  [default: CHECKPOINT_RETENTION]",
)
@_json
def prune(dry_run: bool, older_than: str | None, as_json: bool) -> None:
    """Delete what is kept long enough: finished threads' checkpoints, events that all have. Workers do it, too."""
    from flow.errors import BadInput
    from flow.settings import seconds_of

    try:
        older_than_s = None if older_than is None else seconds_of(older_than)
    except ValueError as exc:
        raise BadInput("--older-than", str(older_than), str(exc)) from exc

    async def run(settings: Settings) -> None:
        from dataclasses import replace

        from flow import retention

        keep = retention.Keep.of(settings)
        if older_than_s is not None:
            keep = replace(keep, checkpoints_s=older_than_s)
        async with _database(settings) as (_url, conn):
            found = await (retention.foresee if dry_run else retention.prune)(conn, keep)
        if as_json:
            _print_json({"dry_run": dry_run} | found.as_json())
        else:
            click.echo(f"{'would delete' if dry_run else 'deleted'} {found.in_words()}")
        if found.failed:
            why = "; ".join(f"{what} ({reason})" for what, reason in found.failed.items())
            raise FlowError(f"not everything could be deleted: {why}")

    _run(run)


@cli.group()
def payments() -> None:
    """Payments that a provider outside makes."""


@payments.command("list")
@click.option("--unknown", is_flag=True, help="Only those that somebody must look at, oldest first.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most this many.")
@_json
def payments_list(unknown: bool, limit: int, as_json: bool) -> None:
    """Every payment, newest first; or those of which nobody knows whether they were made."""

    async def run(settings: Settings) -> None:
        from flow.payments import latest_payments, unknown_payments
        from flow.show import payment_as_json, payment_in_words

        async with _database(settings) as (_url, conn):
            if unknown:
                found = await unknown_payments(conn, limit=limit)
            else:
                found = await latest_payments(conn, status=None, limit=limit)
        if as_json:
            _print_json([{"thread": each.thread_id} | payment_as_json(each) for each in found])
        for each in () if as_json else found:
            click.echo(f"{each.thread_id}: {each.amount} {each.currency} is {payment_in_words(each)}")

    _run(run)


@payments.command("resolve")
@click.argument("thread_id", metavar="THREAD")
@click.option("--paid", "reference", metavar="REF", help="It was paid, under the provider's reference REF.")
@click.option("--not-paid", is_flag=True, help="It was not paid; the thread ends unpaid.")
@_json
def payments_resolve(thread_id: str, reference: str | None, not_paid: bool, as_json: bool) -> None:
    """Say what became of a payment that is unknown: after looking at the provider."""
    from flow import inputs

    if (reference is None) != not_paid:
        raise click.UsageError("say --paid REF or --not-paid")
    inputs.parse_thread_id(thread_id)
    if reference is not None:
        reference = inputs.parse_text("--paid", reference, inputs.MAX_NAME, lines=False).strip()
        if not reference:
            raise click.UsageError("--paid wants the provider's reference")
    user = _user()

    async def run(settings: Settings) -> None:
        from flow.payments import resolve

        async with _database(settings, acts=True) as (url, conn):
            await resolve(conn, thread_id, reference=reference, by=user)
            await _advance_and_report(settings, url, conn, thread_id, as_json=as_json)

    _run(run)


@cli.command()
@_thread
@click.option("--to", required=True, metavar="ADDRESS", help="Who may use it: an approver by address.")
@click.option("--code", "only_code", is_flag=True, help="Make a new code for the link that they have.")
@click.option("--revoke", is_flag=True, help="Refuse the link that they have.")
@click.option("--interrupt", "interrupt_id", metavar="ID", help="Which request.  [default: the one that waits]")
def link(thread_id: str, to: str, only_code: bool, revoke: bool, interrupt_id: str | None) -> None:
    """Print a link by which one person can decide what a thread waits for, once."""
    from flow import inputs

    if only_code and revoke:
        raise click.UsageError("say --code or --revoke, not both")
    inputs.parse_thread_id(thread_id)
    if interrupt_id is not None:
        inputs.parse_interrupt_id(interrupt_id)
    person = inputs.mail_person(to)
    user = _user()

    async def run(settings: Settings) -> None:
        from flow import links

        base = _pages_url(settings)
        async with _database(settings) as (_url, conn):
            approval = await _approval_to_decide(conn, thread_id, interrupt_id)
            if revoke:
                await links.revoke_link(conn, approval, person, by=user)
                click.echo(f"{person.name} has no link to thread {thread_id} any more")
                return
            _must_wait(approval)
            if only_code:
                click.echo(f"code {await links.make_code(conn, approval, person, by=user)}")
                return
            step_up = links.wants_code(approval.request, settings.step_up_over)
            made = await links.make_link(conn, approval, person, by=user, with_code=step_up)
            click.echo(f"{base}/a/{made.token}")
            if made.code is not None:
                click.echo(f"code {made.code}")
                click.echo("Tell the code by another way than the link.", err=True)

    _run(run)


@cli.command()
@click.option(
    "--as", "who", default="cli", show_default=True, metavar="WHO", help="U01ALICE, alice@example.com or cli."
)
@_workspace
def login(who: str, workspace: str | None) -> None:
    """Print a link that signs one person in to the web inbox, once, within ten minutes."""
    user = _user()

    async def run(settings: Settings) -> None:
        from flow.sessions import make_login_link

        base = _pages_url(settings)
        async with _database(settings) as (_url, conn):
            person = await _person_named(settings, conn, who, user, workspace)
            token = await make_login_link(conn, person, by=user)
        click.echo(f"{base}/login/{token}")
        click.echo(f"It signs in as {person.key}, once, within ten minutes. It is not shown again.", err=True)

    _run(run)


@cli.command()
@click.option("--as", "who", metavar="WHO", help="Who is away: U01ALICE, alice@example.com or cli.")
@click.option("--to", metavar="WHO", help="Who decides for them meanwhile, written as approvers are.")
@click.option("--until", metavar="WHEN", help='The last day, such as friday, 2026-12-24 or "3 days".')
@click.option("--back", is_flag=True, help="They are back: nobody decides for them any more.")
@_workspace
@_json
def away(who: str | None, to: str | None, until: str | None, back: bool, workspace: str | None, as_json: bool) -> None:
    """Let somebody decide for a person who is away; without options, list who is."""
    from datetime import UTC, datetime

    from flow import delegations

    if (who is None) != (to is None and until is None and not back):
        raise click.UsageError("say --as WHO with --to and --until, or with --back; or nothing")
    if who is None and workspace is not None:
        raise click.UsageError("--workspace goes with --as WHO")
    if who is not None and (back != (to is None) or back != (until is None)):
        raise click.UsageError("say --to WHO and --until WHEN, or --back")
    user = _user()

    async def run(settings: Settings) -> None:
        if who is None:
            async with _database(settings) as (_url, conn):
                _print_delegations(await delegations.current(conn), as_json=as_json)
            return
        from flow.workspaces import workspace_meant

        where = workspace_meant(workspace, many=settings.many_workspaces)
        async with _database(settings) as (_url, conn):
            person = await _person_named(settings, conn, who, user, where)
            delegate = None if to is None else await _delegate_named(settings, conn, to, where)
        async with _database(settings) as (_url, conn), conn.transaction():
            if delegate is None or until is None:
                held = await delegations.end(conn, person, by=user)
                text = f"nobody decides for {person.name} any more" if held else f"nobody decided for {person.name}"
                _print_json({"person": person.key, "ended": held}) if as_json else click.echo(text)
                return
            # In the machine's own zone, which tells summer time by the day that is meant.
            end = delegations.parse_until(until, now=datetime.now(UTC), zone=None)
            made = await delegations.away(conn, person, to=delegate, until=end, made_by=user)
        _print_delegations([made], as_json=as_json, alone=True)
        async with _database(settings) as (_url, conn):
            why_not = await _tell_delegate(settings, conn, made)
        if why_not:
            click.echo(f"{made.delegate} was not told ({why_not}): tell them yourself", err=True)

    _run(run)


def _print_delegations(found: Sequence[Delegation], *, as_json: bool, alone: bool = False) -> None:
    from flow.text import visible

    shown = [
        {
            "person": each.person,
            "name": each.person_name,
            "to": each.delegate,
            "until": each.until.isoformat(),
            "made_by": each.made_by,
            "workspace": each.workspace,
        }
        for each in found
    ]
    if as_json:
        _print_json(shown[0] if alone else shown)
    for each in () if as_json else found:
        until = f"{each.until.astimezone():%A %Y-%m-%d %H:%M %Z}"
        there = f" in {each.workspace}" if each.workspace else ""
        click.echo(f"{each.delegate} decides for {visible(each.person_name)} ({each.person}){there} until {until}")
    if not found and not as_json:
        click.echo("nobody is away")


@cli.group()
def tokens() -> None:
    """Bearer tokens of the HTTP API."""


@tokens.command("create")
@click.argument("name")
@click.option("--scope", "scopes", multiple=True, required=True, help="read, start or decide; may be repeated.")
@click.option("--workspace", metavar="ID", help="For this workspace alone, where there are many.")
def tokens_create(name: str, scopes: tuple[str, ...], workspace: str | None) -> None:
    """Make a token and print it, once. It acts as api:NAME; to decide, that must be among the approvers."""
    from flow.tokens import SCOPES, create_token, parse_token_name

    parse_token_name(name)
    if wrong := [scope for scope in scopes if scope not in SCOPES]:
        raise click.UsageError(f"--scope {wrong[0]} is none of {', '.join(SCOPES)}")
    wanted = tuple(scope for scope in SCOPES if scope in scopes)
    user = _user()

    async def run(settings: Settings) -> None:
        async with _database(settings) as (_url, conn):
            where = await _named_workspace(settings, conn, workspace) if workspace else None
            secret = await create_token(conn, name, wanted, by=user, workspace=where)
        click.echo(secret)
        click.echo("It is not shown again.", err=True)

    _run(run)


@tokens.command("list")
@_json
def tokens_list(as_json: bool) -> None:
    """Every token: what it may, who made it when, whether it was revoked."""

    async def run(settings: Settings) -> None:
        from flow.tokens import tokens

        async with _database(settings) as (_url, conn):
            found = await tokens(conn)
        if as_json:
            _print_json([each.as_json() for each in found])
        for each in () if as_json else found:
            revoked = f", revoked at {each.revoked_at:%Y-%m-%d %H:%M}" if each.revoked_at else ""
            scopes = ", ".join(each.scopes) + (f" in {each.workspace}" if each.workspace else "")
            click.echo(f"{each.name}: {scopes}; by {each.created_by} at {each.created_at:%Y-%m-%d %H:%M}{revoked}")

    _run(run)


@tokens.command("revoke")
@click.argument("name")
def tokens_revoke(name: str) -> None:
    """Refuse a token from now on."""
    user = _user()

    async def run(settings: Settings) -> None:
        from flow.tokens import revoke_token

        async with _database(settings) as (_url, conn):
            await revoke_token(conn, name, by=user)
        click.echo(f"{name} is revoked")

    _run(run)


@cli.group()
def workspaces() -> None:
    """The workspaces of Slack that the app is installed in, where there are many (TOKEN_KEYS)."""


@workspaces.command("list")
@_json
def workspaces_list(as_json: bool) -> None:
    """Each workspace: since when it has the app, where it is posted, and who approves what there."""

    async def run(settings: Settings) -> None:
        from flow.workspaces import workspaces

        async with _database(settings) as (_url, conn):
            found = await workspaces(conn)
        if as_json:
            _print_json([row.as_json() for row in found])
        for row in () if as_json else found:
            click.echo(row.in_words())
        if not found and not as_json:
            click.echo("none")

    _run(run)


@workspaces.command("set")
@click.argument("workspace")
@click.option("--channel", metavar="ID", help="Where requests are posted there, by its id (C…).")
@click.option("--ops-channel", metavar="ID", help="Where alarms are; empty: in the channel.")
@click.option(
    "--policy",
    "policy_file",
    metavar="FILE",
    help="Who approves what there, written as policy.toml; - reads it from stdin.",
)
@click.option("--filers", metavar="NAMES", help="Who files claims there, written as FILERS; empty: every full member.")
def workspaces_set(
    workspace: str, channel: str | None, ops_channel: str | None, policy_file: str | None, filers: str | None
) -> None:
    """Set a workspace up: what is not said stays as it is. Until it has a policy, nothing is filed there."""
    from flow import inputs

    if (channel, ops_channel, policy_file, filers) == (None, None, None, None):
        raise click.UsageError("say --channel, --ops-channel, --policy or --filers")
    given = {
        "channel": inputs.parse_channel("--channel", channel),
        "ops_channel": inputs.parse_channel("--ops-channel", ops_channel),
        "filers": inputs.parse_filers("--filers", filers),
        "policy": sys.stdin.read() if policy_file == "-" else inputs.parse_file("--policy", policy_file),
    }
    user = _user()

    async def run(settings: Settings) -> None:
        from flow.workspaces import set_up

        async with _database(settings) as (_url, conn):
            row = await set_up(conn, workspace, by=user, **given)
        click.echo(row.in_words())

    _run(run)


@workspaces.command("remove")
@click.argument("workspace")
def workspaces_remove(workspace: str) -> None:
    """Delete a workspace's token, and have Slack revoke it; and its policy, its tokens of the API and its members'
    sessions. What was filed there stays."""
    user = _user()

    async def run(settings: Settings) -> None:
        from bot.workspaces import revoke
        from flow.workspaces import removed, workspace_of

        async with _database(settings) as (_url, conn):
            row = await workspace_of(conn, workspace)
            why_not = await revoke(settings, row) if row.is_installed else None
            await removed(conn, row, by=user)
        had = "its token" if row.is_installed else "it had no token, and"
        click.echo(
            f"{workspace} is removed: {had}, its policy, its tokens of the API and its members' sessions are gone"
        )
        if why_not:
            click.echo(f"Slack was not told ({why_not}): uninstall the app there by hand", err=True)

    _run(run)


@workspaces.command("rotate")
def workspaces_rotate() -> None:
    """Encrypt every token anew, with the first of TOKEN_KEYS: then the others can be taken out."""
    user = _user()

    async def run(settings: Settings) -> None:
        from flow.cipher import Cipher
        from flow.workspaces import rotate

        cipher = Cipher.of(settings)
        async with _database(settings) as (_url, conn):
            count = await rotate(conn, cipher, by=user)
        click.echo(f"{count} encrypted anew, with the first of TOKEN_KEYS")

    _run(run)


@cli.group()
def webhooks() -> None:
    """Events that are sent to the endpoints of WEBHOOK_URLS."""


@webhooks.command("list")
@click.option("--limit", type=click.IntRange(0, 10_000), default=50, show_default=True, help="At most this many each.")
@_json
def webhooks_list(limit: int, as_json: bool) -> None:
    """The endpoints, what waits for them, and their newest dead letters."""

    async def run(settings: Settings) -> None:
        from flow.deliveries import endpoint_states

        async with _database(settings) as (_url, conn):
            found = await endpoint_states(conn, limit=limit)
        if as_json:
            _print_json([state.as_json() | {"configured": state.name in settings.webhook_url_of} for state in found])
        for state in () if as_json else found:
            click.echo(state.in_words(configured=state.name in settings.webhook_url_of))

    _run(run)


@webhooks.command("resend")
@click.option("--event", "event_id", type=click.IntRange(1, (1 << 63) - 1), metavar="ID", help="This event.")
@click.option("--dead", is_flag=True, help="Every dead letter, of all endpoints or of one.")
@click.option("--endpoint", metavar="NAME", help="To this endpoint.")
def webhooks_resend(event_id: int | None, dead: bool, endpoint: str | None) -> None:
    """Send again, under the old id: one event, or every dead letter. An endpoint that was turned off is turned on."""
    if (event_id is None) != dead or (event_id is not None and endpoint is None):
        raise click.UsageError("say --event ID --endpoint NAME, or --dead")
    user = _user()

    async def run(settings: Settings) -> None:
        from flow.database import Lock, is_present
        from flow.deliveries import resend_dead, resend_event

        async with _database(settings) as (url, conn):
            if event_id is not None and endpoint is not None:
                await resend_event(conn, event_id, endpoint, by=user)
                count = 1
            else:
                count = await resend_dead(conn, endpoint, by=user)
            click.echo(f"{count} to be sent again")
            if not await is_present(conn, Lock.WEBHOOKS):
                sent, failed = await _deliver_webhooks(settings, url, within_s=300.0)
                _report_sent(sent, failed)

    _run(run)


@webhooks.command("forget")
@click.argument("name")
def webhooks_forget(name: str) -> None:
    """Forget an endpoint that is gone for good, and what waits for it: it holds no events any more."""
    user = _user()

    async def run(settings: Settings) -> None:
        from flow.deliveries import forget_endpoint

        if name in settings.webhook_url_of:
            raise FlowError(f"{name} is in WEBHOOK_URLS: take it out first, on every machine")
        async with _database(settings) as (_url, conn):
            lost = await forget_endpoint(conn, name, by=user)
        click.echo(f"{name} is forgotten, with {lost} events that it has not got")

    _run(run)


@cli.group(invoke_without_command=True)
@click.option("--thread", "thread_id", metavar="ID", help="Only of this thread.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most this many.")
@_json
@click.pass_context
def audit(context: click.Context, thread_id: str | None, limit: int, as_json: bool) -> None:
    """Who did what, through which door: the newest rows of the audit log."""
    from flow import inputs

    if context.invoked_subcommand is not None:
        return
    if thread_id is not None:
        inputs.parse_thread_id(thread_id)

    async def run(settings: Settings) -> None:
        from flow.audit import latest_entries
        from flow.show import print_audit

        async with _database(settings) as (_url, conn):
            found = await latest_entries(conn, thread_id=thread_id, limit=limit)
        if as_json:
            _print_json([entry.as_json() for entry in found])
        else:
            print_audit(found)

    _run(run)


@audit.command("verify")
@click.option("--head", metavar="HEAD", help="A head of earlier, as this command printed it: is it still in the chain?")
@_json
def audit_verify(head: str | None, as_json: bool) -> None:
    """Seal what is written, then read all of it: was a row changed, taken out, moved or cut off? Exit 1 if so."""

    async def run(settings: Settings) -> None:
        from flow.audit import Head, verify

        noted = Head.parse(head) if head is not None else None
        async with _database(settings) as (_url, conn):
            found = await verify(conn, noted=noted)
        if as_json:
            _print_json(found.as_json())
        elif found.wrong is None:
            click.echo(found.in_words())
        if found.wrong is not None:
            raise FlowError(found.wrong)

    _run(run)


@audit.command("export")
@click.option(
    "--from", "start", type=click.IntRange(1), default=1, metavar="POSITION", help="Where in the chain to begin."
)
def audit_export(start: int) -> None:
    """Every sealed row as a line of JSON, in the order of the chain: what comes later is always further down."""

    async def run(settings: Settings) -> None:
        from flow.audit import chain, seal_all

        async with _database(settings) as (_url, conn):
            await seal_all(conn)
            async for sealed in chain(conn, start=start):
                click.echo(sealed.as_line())

    _run(run)


@cli.group()
def db() -> None:
    """The embedded Postgres."""


@db.command("stop")
def db_stop() -> None:
    """Stop the embedded Postgres; the next command starts it again."""

    async def run(settings: Settings) -> None:
        from flow.embedded import stop_embedded

        stopped = stop_embedded(settings.claim_flow_home)
        click.echo("stopped" if stopped else "it is not running")

    _run(run)


@cli.group(invoke_without_command=True)
@_json
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check the surroundings; each finding comes with its fix. Exit 1 if anything is wrong."""
    if context.invoked_subcommand is not None:
        return

    async def run(settings: Settings) -> None:
        from bot.doctor import examine

        findings = [finding async for finding in examine(settings)]
        if as_json:
            _print_json([finding.as_json() for finding in findings])
        else:
            for finding in findings:
                click.echo(f"{'ok   ' if finding.ok else 'WRONG'}  {finding.what}: {finding.found}")
                if finding.fix:
                    click.echo(f"       {finding.fix}")
        if not all(finding.ok for finding in findings):
            raise SystemExit(1)

    _run(run)


@doctor.command("flow")
@click.argument("name")
@_json
def doctor_flow(name: str, as_json: bool) -> None:
    """Read a flow's code for traps; each comes with its file, line and fix. Exit 1 if there are any."""

    async def run(settings: Settings) -> None:
        from flow.flows import newest_flow
        from flow.traps import traps_of

        findings = traps_of(newest_flow(settings.flow_modules, name))
        if as_json:
            _print_json([finding.as_json() for finding in findings])
        else:
            for finding in findings:
                click.echo(f"{finding.file}:{finding.line}: {finding.trap}: {finding.what}")
                click.echo(f"       {finding.fix}")
            if not findings:
                click.echo("no traps found")
        if findings:
            raise SystemExit(1)

    _run(run)


@cli.group()
def approvals() -> None:
    """Requests that wait."""


@approvals.command("refresh")
@click.option("--thread", "thread_id", metavar="ID", help="What this thread waits for.")
@click.option("--all", "all_of_them", is_flag=True, help="Everything that waits.")
@_json
def approvals_refresh(thread_id: str | None, all_of_them: bool, as_json: bool) -> None:
    """Apply the policy of today to what waits: by itself a change of it reaches only what is asked afterwards.

    Votes so far are void, and the time begins anew; a claim is asked for again from its first tier on.
    """
    from flow import inputs

    if (thread_id is None) != all_of_them:
        raise click.UsageError("say --thread ID or --all")
    if thread_id is not None:
        inputs.parse_thread_id(thread_id)

    async def run(settings: Settings) -> None:
        from dataclasses import asdict

        from flow.advance import advance
        from flow.approvals import waiting_threads
        from flow.changes import refresh
        from flow.policy import in_words, policy_of

        policy = policy_of(settings)
        done: list[dict[str, Any]] = []
        async with _database(settings, acts=True) as (url, conn):
            for each in [thread_id] if thread_id else await waiting_threads(conn):
                try:
                    tiers = await refresh(conn, policy, each, by=_user())
                    await advance(url, conn, each, settings)
                except FlowError as exc:
                    done.append({"thread": each, "tiers": [], "refused": str(exc)})
                    click.echo(f"{each}: {exc}", err=True)
                    continue
                done.append({"thread": each, "tiers": [asdict(tier) for tier in tiers], "refused": None})
                for line in [] if as_json else [in_words(tier) for tier in tiers] or ["it waits for nobody"]:
                    click.echo(f"{each}: {line}")
            await _deliver(settings, conn)
        if as_json:
            _print_json(done[0] if thread_id else done)
        if refused := sum(bool(each["refused"]) for each in done):
            raise FlowError(f"{refused} could not be refreshed, and are as they were: the reasons are above")

    _run(run)


@cli.command()
@click.option("--click", "click_too", is_flag=True, help="Press Approve too, and end: for scripts.")
def demo(click_too: bool) -> None:
    """The whole product in a minute, with a Slack on this machine. Leaves nothing behind."""
    from bot.demo import run_demo, without_settings

    async def run(_settings: Settings) -> None:
        await run_demo(click_too=click_too)

    with without_settings():
        _run(run)


# What the commands share


@contextlib.asynccontextmanager
async def _database(
    settings: Settings, *, checkpoints: bool = False, acts: bool = False
) -> AsyncIterator[tuple[str, Connection]]:
    """The database, with our tables (and LangGraph's, for `checkpoints`) up to date: its URL and one connection.

    `acts`: the command drives or decides, so the policy that it goes by belongs in the audit log.
    """
    from flow.database import connect, database_url, ensure_schema

    url = database_url(settings)
    async with await connect(url, "door") as conn:
        await ensure_schema(url, conn, by=_user())
        if checkpoints:
            from flow.drive import ensure_checkpoint_tables

            await ensure_checkpoint_tables(url, conn)
        if settings.webhook_url_of:
            from flow.deliveries import add_endpoints

            # Whoever files the first claim knows of them, not only who delivers.
            await add_endpoints(conn, settings.webhook_url_of)
        if settings.trace_targets:
            from flow.exports import add_targets

            await add_targets(conn, settings.trace_targets)
        if acts:
            from flow.audit import record_policy
            from flow.policy import policy_of

            await record_policy(conn, policy_of(settings), by=_user())
        yield url, conn


async def _story(conn: Connection, thread_id: str) -> Story:
    from flow.show import stories_of
    from flow.threads import thread_of

    [story] = await stories_of(conn, [await thread_of(conn, thread_id)])
    return story


def _must_wait(approval: Approval) -> None:
    from flow.errors import NothingToDecide

    if approval.status != "pending":
        raise NothingToDecide(approval.thread_id, f"its request is {approval.status}")


def _pages_url(settings: Settings) -> str:
    if settings.pages_url is None:
        raise FlowError("PUBLIC_URL is not set: a link needs to know where browsers reach the bot (see .env.example)")
    return settings.pages_url


async def _named_workspace(settings: Settings, conn: Connection, workspace: str | None) -> str | None:
    """The one of several that is meant. Raises BadInput, UnknownWorkspace, WorkspaceClosed."""
    from flow.errors import WorkspaceClosed
    from flow.workspaces import workspace_meant, workspace_of

    named = workspace_meant(workspace, many=settings.many_workspaces)
    if named is not None and not (await workspace_of(conn, named)).is_installed:
        raise WorkspaceClosed(named, "has uninstalled the app: nobody of it is let in until it is installed again")
    return named


async def _person_named(settings: Settings, conn: Connection, who: str, user: str, workspace: str | None) -> Person:
    """The person of a session; the one who types here is nobody special on the web.

    A member of Slack is of a workspace, where there are many; whoever else is named is of one only if that is said.
    """
    import re
    from dataclasses import replace

    from flow import inputs
    from flow.model import Person

    if who in ("cli", user) or "@" in who:
        where = await _named_workspace(settings, conn, workspace) if workspace else None
        person = inputs.mail_person(who) if "@" in who else Person(key=user, name=user, names=frozenset({user}))
        return replace(person, workspace=where)
    match = re.fullmatch(r"(?:slack:([TE][A-Z0-9]{2,})/)?([UW][A-Z0-9]{2,})", who)
    if match is None:
        raise click.UsageError("--as is U01ALICE, slack:T01TEAM/U01ALICE, alice@example.com or cli")
    from bot.people import slack_person

    named = await _named_workspace(settings, conn, workspace)
    ours = frozenset({named}) if named else await _own_team(settings)
    team_id = match[1] or next((key for key in ours if key.startswith("T")), None)
    if team_id is None:
        # Under another key the same person would have a second voice.
        why = f"{named} is a whole grid" if named else "Slack is off"
        raise FlowError(f"nobody here knows whose member {who} is ({why}): write slack:TEAM/{who}")
    grid = named if named and named.startswith("E") else None
    return slack_person(
        user_id=match[2],
        name=match[2],
        team_id=team_id,
        enterprise_id=grid,
        # Whoever types here says that this is a team of the grid.
        own_team={team_id} if grid else ours,
        workspace=named,
    )


async def _delegate_named(settings: Settings, conn: Connection, to: str, workspace: str | None) -> str:
    """One person, by the name that a list of approvers would have. Raises BadInput.

    Where Slack is off, nobody says who is a guest there, and at the decision nobody of it is let decide for another.
    """
    from flow import inputs
    from flow.errors import BadInput
    from flow.policy import is_group
    from flow.settings import approver_name

    try:
        delegate = approver_name(inputs.parse_text("--to", to, inputs.MAX_NAME, lines=False))
    except ValueError as exc:
        raise BadInput("--to", to, str(exc)) from exc
    if is_group(delegate):
        raise BadInput("--to", to, "name one person, not a group")
    if settings.slack_is_on:
        from bot.groups import OwnTeam

        async with _slack(settings, conn, workspace) as client:
            # A guest, a bot or an outsider of Slack is refused.
            await OwnTeam(client).check_delegate(delegate)
    return delegate


async def _tell_delegate(settings: Settings, conn: Connection, made: Delegation) -> str | None:
    """As `/claims away` does; why they were not told, or None."""
    if not settings.slack_is_on:
        return "Slack is off"
    from bot.away import tell_delegate

    async with _slack(settings, conn, made.workspace) as client:
        return await tell_delegate(client, made)


@contextlib.asynccontextmanager
async def _slack(settings: Settings, conn: Connection, workspace: str | None) -> AsyncIterator[AsyncWebClient]:
    """The client of this workspace, or of the one that there is. Raises WorkspaceClosed, TokenUnreadable."""
    from bot.slack_api import slack_client

    if workspace is None:
        async with slack_client(settings) as client:
            yield client
        return
    from bot.workspaces import Clients
    from flow.workspaces import workspace_of

    async with Clients.of(settings) as clients:
        yield clients.client(await workspace_of(conn, workspace))


async def _own_team(settings: Settings) -> frozenset[str]:
    """The team of the bot token; empty if Slack is off."""
    if not settings.slack_is_on:
        return frozenset()
    import aiohttp
    from slack_sdk.errors import SlackApiError

    from bot.groups import OwnTeam
    from bot.slack_api import slack_client

    async with slack_client(settings) as client:
        try:
            return await OwnTeam(client).keys()
        except (SlackApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise FlowError(f"Slack does not say which team is ours ({type(exc).__name__}): try again") from exc


async def _approval_to_decide(
    conn: Connection, thread_id: str, interrupt_id: str | None, *, whole_claim: bool = False
) -> Approval:
    """The approval that is meant: the one named, else the one that waits, else the last one.

    `whole_claim`: what is said of it is said of every request of the claim, whichever waits.
    """
    from flow.errors import NothingToDecide, UnknownApproval

    story = await _story(conn, thread_id)
    if interrupt_id is not None:
        for approval in story.approvals:
            if approval.interrupt_id == interrupt_id:
                return approval
        raise UnknownApproval(interrupt_id)
    if len(story.pending) > 1:
        which = ", ".join(each.interrupt_id for each in story.pending)
        raise NothingToDecide(thread_id, f"it waits for {len(story.pending)}: say which with --interrupt ({which})")
    if story.pending and len(story.approvals) > 1 and not whole_claim:
        # The same command typed twice must not answer for the next tier.
        raise NothingToDecide(
            thread_id, f"one was decided, and another waits: say so with --interrupt {story.pending[0].interrupt_id}"
        )
    if story.approval is None:
        paid = f", reference {story.payment.reference}" if story.payment else ""
        raise NothingToDecide(thread_id, f"it is {story.thread.status}{paid}")
    return story.approval


async def _advance_and_report(settings: Settings, url: str, conn: Connection, thread_id: str, *, as_json: bool) -> None:
    """Have the thread driven, say where it is now, and try to tell Slack."""
    from flow.advance import advance
    from flow.database import Lock, is_present
    from flow.show import in_words, stories_of

    with _bar() as tell:
        thread = await advance(url, conn, thread_id, settings, tell=tell)
    [story] = await stories_of(conn, [thread])
    if as_json:
        _print_json(story.as_json())
    else:
        click.echo(in_words(story))
    sys.stdout.flush()
    has_news = story.approvals or thread.status in ("stuck", "unknown", "unavailable")
    if has_news and not await is_present(conn, Lock.DELIVERER):
        await _deliver(settings, conn)
    if thread.status in ("stuck", "failed", "unknown", "unavailable") or thread.put_off:
        raise FlowError(f"thread {thread_id} did not get through: {thread.reason}")
    if thread.due_at is not None:
        raise FlowError(f"thread {thread_id} is recorded, but nobody has driven it in time: look at the workers")


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[Thread], None] | None]:
    """Shows a person who waits how far a long flow is; None if nobody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    bar: list[Any] = []

    def tell(thread: Thread) -> None:
        if thread.progress is None:
            return
        done, total = thread.progress
        if not bar:
            # Only a flow that tells how far it is costs the import.
            from rich.console import Console
            from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

            shown = Progress(
                *Progress.get_default_columns()[:2],
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            shown.start()
            bar.extend((shown, shown.add_task(thread.thread_id)))
        bar[0].update(bar[1], completed=done, total=total)

    try:
        yield tell
    finally:
        if bar:
            bar[0].stop()


async def _deliver(settings: Settings, conn: Connection, *, within_s: float = 15.0) -> tuple[int, int]:
    """Send what is due now, and begin nothing after `within_s`; how many were sent, and how many not.

    What was not stays for the next deliverer.
    """
    sent = failed = 0
    if settings.slack_is_on:
        from bot.deliver import Deliverer

        async with Deliverer.of(settings) as deliverer:
            sent, failed = await deliverer.sweep(conn, within_s=within_s)
    if settings.smtp_url:
        from bot.mail import Mailer

        mailed, refused = await Mailer.of(settings).sweep(conn, within_s=within_s)
        sent, failed = sent + mailed, failed + refused
    return sent, failed


async def _deliver_webhooks(settings: Settings, url: str, *, within_s: float = 15.0) -> tuple[int, int]:
    """The same for the endpoints of WEBHOOK_URLS."""
    if not settings.webhook_url_of:
        return 0, 0
    from bot.webhooks_out import WebhookDeliverer

    async with WebhookDeliverer.of(settings) as deliverer:
        return await deliverer.sweep(url, within_s=within_s)


async def _send_traces(settings: Settings, url: str, *, within_s: float = 15.0) -> tuple[int, int]:
    """The same for the targets of traces, in threads."""
    if not settings.trace_targets:
        return 0, 0
    from bot.traces_out import TraceSender

    async with TraceSender.of(settings) as sender:
        return await sender.sweep(url, within_s=within_s)


def _report_sent(sent: int, failed: int) -> None:
    click.echo(f"{sent} sent, {failed} not")
    if failed:
        raise FlowError("not everything was sent: the reasons are above")


def _serve(*, web: bool, worker: bool) -> None:
    async def run(settings: Settings) -> None:
        from bot.server import run_services, stop_on_signals
        from flow.log import log_to_stderr

        log_to_stderr(settings)
        async with _database(settings, checkpoints=worker, acts=True) as (url, _conn):
            pass
        await run_services(settings, url, stop_on_signals(), web=web, worker=worker)

    _run(run)


def _run(command: Callable[[Settings], Coroutine[Any, Any, None]]) -> None:
    """Run a command with the settings. A database that goes away meanwhile is a refusal: nothing is half done."""
    import psycopg

    from flow.settings import read_settings

    try:
        try:
            asyncio.run(command(read_settings()))
        except BaseExceptionGroup as group:
            # Of the services that ran side by side, the first that failed is the reason for the others' end.
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
    except psycopg.Error as exc:
        raise FlowError(
            f"the database refused or went away ({type(exc).__name__}: {exc}): nothing is half done"
        ) from exc


def _user() -> str:
    from flow import inputs

    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a number that no account has.
        name = f"uid-{os.getuid()}"
    return f"cli:{inputs.parse_text('your user name', name, inputs.MAX_NAME, lines=False)}"


def _typist(note: str = "") -> Person:
    """Whoever types here, who has the database anyway; `note` changes what is shown, never who counts."""
    from flow.model import Person

    user = _user()
    return Person(key=user, name=f"{note} ({user})" if note else user, names=frozenset({user}), trusted=True)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=True))


def main() -> None:
    """The entry point of `claim-flow` and of this file."""
    # Most of a command is imports. What they make stays, so collecting it, or walking it at the end, finds nothing:
    # a fifth to a third of a command's time.
    gc.set_threshold(100_000)
    try:
        cli()
    except FlowError as exc:
        click.echo(f"error: {' '.join(str(exc).split())}", err=True)
        raise SystemExit(exc.exit_code) from None
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
