"""`doctor`: looks at the surroundings and says what to fix."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from uuid import uuid4

import psycopg

from bot.doctor_slack import slack_findings
from bot.findings import Finding
from bot.otlp import body_of, targets_of
from bot.traces_out import http_session, post
from flow import audit, deliveries, exports, mails, notices, retention
from flow.assess import Unanswered, adviser_of
from flow.database import check_locks, connect, database_url, ensure_schema
from flow.errors import FlowError
from flow.figures import MOST
from flow.log import hider, secrets_of
from flow.model import Claim
from flow.policy import LIMITS, policy_of
from flow.providers import CannotLookUp, Order, provider_of
from flow.settings import Settings
from flow.starting import Checker

# Slack's signatures are good for five minutes; a clock that is off by this much will be off by more.
_CLOCKS_APART_S = 30.0

# Whoever delivers is away, or Slack is, long before this: nothing is put off for more than a minute at a time.
_PATIENCE_S = 600.0

_FIX_TRACES = {
    "otlp": "correct OTEL_EXPORTER_OTLP_ENDPOINT (by HTTP: a collector's port 4318, not 4317), or what it wants"
    " to be told in OTEL_EXPORTER_OTLP_HEADERS",
    "langfuse": "correct LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY, both of one project, and LANGFUSE_BASE_URL, which"
    " each region has of its own",
}

_SAMPLE = Claim(amount=Decimal("1.00"), currency="USD", payee="nobody", note="A question of the doctor command's.")


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Everything that can be wrong outside of us, in the order in which it matters."""
    url, finding = await _database(settings)
    yield finding
    if url is not None:
        yield await _clock(url)
        yield await _locks(url)
        yield await _audit(url)
        yield await _retention(settings, url)
        async for finding in _endpoints(settings, url):
            yield finding
        async for finding in _traces(settings, url):
            yield finding
        if settings.slack_is_on:
            yield await _notices(url)
        if settings.smtp_url is not None:
            yield await _mails(url)
    yield await _flows()
    if not settings.many_workspaces:
        yield _policy(settings)
    yield await _payments(settings)
    yield await _model(settings)
    async for finding in slack_findings(settings, url):
        yield finding


async def _database(settings: Settings) -> tuple[str | None, Finding]:
    try:
        url = database_url(settings)
        async with await connect(url, "door") as conn:
            await ensure_schema(url, conn, by="doctor")
            where = "embedded" if settings.database_url is None else "DATABASE_URL"
            version = conn.info.server_version
            found = f"Postgres {version // 10000}.{version % 10000} ({where}), tables up to date"
    except (FlowError, psycopg.Error) as exc:
        return None, Finding(what="database", ok=False, found=str(exc), fix="set DATABASE_URL, or unset it")
    return url, Finding(what="database", ok=True, found=found)


async def _clock(url: str) -> Finding:
    """Deadlines go by the database's clock, signatures of requests by ours."""
    async with await connect(url, "door") as conn:
        row = await (await conn.execute("SELECT extract(epoch FROM clock_timestamp())::float8 AS at")).fetchone()
        ours = time.time()
    assert row is not None
    apart_s = abs(row["at"] - ours)
    ahead = "ahead of" if row["at"] > ours else "behind"
    found = f"the database's is {apart_s:.1f} s {ahead} this machine's"
    ok = apart_s < _CLOCKS_APART_S
    return Finding(what="clock", ok=ok, found=found, fix="" if ok else "let both machines keep time by NTP")


async def _locks(url: str) -> Finding:
    try:
        await check_locks(url)
    except FlowError as exc:
        return Finding(what="locks", ok=False, found=str(exc), fix="connect to the server itself, not to a pooler")
    return Finding(what="locks", ok=True, found="they hold through this connection")


async def _audit(url: str) -> Finding:
    """The end of the chain, whose length makes no difference; `audit verify` reads all of it."""
    async with await connect(url, "door") as conn:
        chain = await audit.verify(conn, newest=audit.BATCH)
    if chain.wrong is None:
        read = min(audit.BATCH, chain.head.position)
        return Finding(what="audit", ok=True, found=f"{chain.head.position} rows, of which the newest {read} are whole")
    fix = (
        "somebody has got around the application: find out who has this database's password, compare what"
        " `claim_flow.py audit verify` says with an earlier `audit export`, and do not approve what was changed"
    )
    return Finding(what="audit", ok=False, found=chain.wrong, fix=fix)


async def _retention(settings: Settings, url: str) -> Finding:
    async with await connect(url, "door") as conn:
        late = await retention.overdue(conn, retention.Keep.of(settings))
    if late is None:
        return Finding(what="retention", ok=True, found="nothing is overdue")
    thread_id, ended_at = late
    found = f"thread {thread_id} ended at {_utc(ended_at)}, and what only its run needed is not deleted"
    fix = "have `serve` or `work` run, and look at what they log; or see what `claim_flow.py prune` says"
    return Finding(what="retention", ok=False, found=found, fix=fix)


async def _endpoints(settings: Settings, url: str) -> AsyncIterator[Finding]:
    """Those for which events are held until somebody does something."""
    async with await connect(url, "door") as conn:
        states = await deliveries.endpoint_states(conn, limit=1)
    for state in states:
        since = f" since {_utc(state.oldest)}" if state.oldest else ""
        held = f"{state.name} holds {state.waiting} events{since}, and {state.dead_count} dead letters"
        forget = f"forget it for good with `claim_flow.py webhooks forget {state.name}`"
        resend = f"`claim_flow.py webhooks resend --dead --endpoint {state.name}`"
        if state.name not in settings.webhook_url_of:
            found, fix = f"{held}: it is not in WEBHOOK_URLS", f"put it back, or {forget}"
        elif state.turned_off_at is not None:
            found = f"{held}: it is off since {_utc(state.turned_off_at)} ({state.reason})"
            fix = f"turn it on with {resend}; or take it out of WEBHOOK_URLS, and {forget}"
        elif state.dead:
            found, fix = f"{held}; the last of these: {state.dead[0].error}", f"mend what that says, then {resend}"
        elif _is_late(state.oldest):
            found, fix = held, "have `serve`, `bot` or `work` run with it in WEBHOOK_URLS, and see `webhooks list`"
        else:
            continue
        yield Finding(what=f"webhooks to {state.name}", ok=False, found=found, fix=fix)


async def _traces(settings: Settings, url: str) -> AsyncIterator[Finding]:
    """Each target is sent a request without spans, which whoever takes traces answers as it answers others."""
    async with await connect(url, "door") as conn:
        states = await exports.target_states(conn)
    hide = hider(secrets_of(settings))
    async with http_session() as http:
        for target in targets_of(settings):
            answer, state = await post(http, target, body_of([], {})), states.get(target.name)
            held = f"; {state.waiting} threads wait, since {_utc(state.oldest)}" if state and state.oldest else ""
            fix = ""
            if not answer.taken:
                fix = _FIX_TRACES[target.name]
            elif state and _is_late(state.oldest):
                fix = "have `serve` or `bot` run, then `claim_flow.py deliver`, and look at what it logs"
            found = hide(f"{target.url} {'takes them' if answer.taken else answer.error}{held if fix else ''}")
            yield Finding(what=f"traces to {target.name}", ok=not fix, found=found, fix=fix)
    for name in states.keys() - set(settings.trace_targets):
        fix = "set it up here as it is elsewhere, or start `serve`, `bot` or `work` once more, which forget it"
        found = "some process has it in its settings, and this one has not"
        yield Finding(what=f"traces to {name}", ok=False, found=found, fix=fix)


def _is_late(oldest: datetime | None) -> bool:
    return oldest is not None and (datetime.now(UTC) - oldest).total_seconds() > _PATIENCE_S


def _utc(at: datetime | None) -> str:
    assert at is not None
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


async def _notices(url: str) -> Finding:
    async with await connect(url, "door") as conn:
        late = await notices.undelivered(conn, patience_s=_PATIENCE_S)
    if late is None:
        return Finding(what="messages", ok=True, found="none failed, and none waits for long")
    counts = {"failed for good": late.failed, f"waiting for more than {_PATIENCE_S / 60:.0f} minutes": late.waiting}
    found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    since = f", since {_utc(late.since)}" if late.since else ""
    found += f"; the oldest is the {late.kind} of thread {late.thread_id}{since}"
    error = f"; the last error: {late.error}" if late.error else "; nobody has tried: no bot runs"
    fix = "mend what the error says, have `serve` or `bot` run, then `claim_flow.py deliver`"
    return Finding(what="messages", ok=False, found=found + error, fix=fix)


async def _mails(url: str) -> Finding:
    async with await connect(url, "door") as conn:
        failed = await mails.failed_mails(conn, most=MOST)
    if not failed:
        return Finding(what="mails", ok=True, found="none failed")
    first = failed[0]
    found = f"{len(failed)} failed for good; the first, of thread {first.thread_id} to {first.address}: {first.error}"
    fix = "mend what the error says, then `claim_flow.py deliver`; or bring them a link (`claim_flow.py link`)"
    return Finding(what="mails", ok=False, found=found, fix=fix)


async def _flows() -> Finding:
    checker = Checker()
    try:
        return Finding(what="flows", ok=True, found=", ".join(await checker.names()))
    except FlowError as exc:
        return Finding(what="flows", ok=False, found=str(exc), fix="correct the module, or FLOWS")
    finally:
        await checker.close()


def _policy(settings: Settings) -> Finding:
    try:
        policy = policy_of(settings)
    except FlowError as exc:
        return Finding(what="policy", ok=False, found=str(exc), fix="see policy.example.toml")
    if settings.policy_path is not None:
        tiers = [policy.tier(name) for name in policy.names]
        fix = ""
        if not all(tier.approvers for tier in tiers):
            fix = "give the tier approvers, or only the command line can decide"
        elif any(tier.step_up for tier in tiers) and settings.public_url is None:
            fix = "set PUBLIC_URL: what takes the page (step_up_over) could be approved by nobody in Slack"
        return Finding(what="policy", ok=not fix, found=f"{settings.policy_path}: {'; '.join(policy.words)}", fix=fix)
    limits = ", ".join(f"{limit} {currency}" for currency, limit in LIMITS.items())
    asked = f"over {limits}, and in any other currency, one of"
    if not settings.approvers:
        found, fix = f"{asked} nobody: every click will be refused", "set APPROVERS to member ids"
        # Without Slack the command line decides, and needs no list.
        return Finding(what="policy", ok=not settings.slack_is_on, found=found, fix=fix)
    return Finding(what="policy", ok=True, found=f"{asked} {', '.join(settings.approver_names)}")


async def _payments(settings: Settings) -> Finding:
    """A look-up of a key that nobody has used moves no money; whether it would be paid, only a payment would tell."""
    try:
        provider = provider_of(settings)
    except FlowError as exc:
        return Finding(what="payments", ok=False, found=str(exc), fix="complete the settings of PAYMENT_PROVIDER")
    if provider is None:
        return Finding(what="payments", ok=True, found="in our own ledger")
    key = f"doctor:{uuid4()}"
    order = Order(key=key, thread_id="doctor", amount=Decimal(1), currency="USD", payee="")
    try:
        found = await provider.look_up(order)
    except CannotLookUp:
        return Finding(what="payments", ok=True, found=f"by {provider.name} (not asked: only a payment would tell)")
    except FlowError as exc:
        fix = 'let PAYMENT_LOOKUP_URL answer {"reference": null}, with 2xx or 404, where nothing was paid'
        return Finding(what="payments", ok=False, found=f"by {provider.name}: {exc}", fix=fix)
    if found is not None:
        fix = "let PAYMENT_LOOKUP_URL tell what was paid under this Idempotency-Key, and nothing else"
        return Finding(what="payments", ok=False, found=f"by {provider.name}: {key} is paid, as {found}", fix=fix)
    return Finding(what="payments", ok=True, found=f"by {provider.name}, which answers look-ups")


async def _model(settings: Settings) -> Finding:
    """Asked about a claim of ours: whether it can say something that we understand is what matters."""
    adviser = adviser_of(settings)
    if adviser is None:
        fix = "to be advised, set OPENROUTER_API_KEY or OPENAI_API_KEY"
        return Finding(what="model", ok=True, found="off", fix=fix)
    try:
        _answer, prompt_tokens, completion_tokens = await adviser.ask(_SAMPLE)
    except Unanswered as exc:
        fix = "look at OPENAI_BASE_URL, MODEL and the key; claims go on without advice"
        return Finding(what="model", ok=False, found=f"{adviser.model} at {adviser.base_url}: {exc}", fix=fix)
    tokens = prompt_tokens + completion_tokens
    return Finding(what="model", ok=True, found=f"{adviser.model} answers (that took {tokens} tokens)")
