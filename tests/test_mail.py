"""Approvers by address get a link by mail, again and again until it is taken, whoever dies in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from pydantic import SecretStr

from bot import blocks
from bot.doctor import examine
from bot.findings import Finding
from bot.mail import Mailer, MailServer, message_of
from flow import links, mails
from flow.approvals import approval_of, decide
from flow.changes import refresh
from flow.database import Connection
from flow.figures import figures
from flow.inputs import mail_person
from flow.mails import Mail
from flow.model import Verdict
from flow.notices import failures_of
from flow.policy import Rule, Tier, Tiers
from flow.settings import Settings
from flow.threads import thread_of
from tests.asking import REFUND, put
from tests.browsing import Visitor, pages_in_process
from tests.command import Terminal
from tests.local_slack import free_port
from tests.people import ALICE, ANN, YES, ask, start_claim
from tests.rows import all_rows, break_table, mend_table, one_row, until, value
from tests.smtp_server import PASSWORD, USER, SmtpServer, smtp_server

MARY = "mary@example.com"
BY_MAIL = Tier(name="approval", approvers=(MARY, "mail:mary@example.com", "John@Example.com", "U01ALICE"))
MARY_ALONE = Tier(name="approval", approvers=(MARY,))
APPROVE = Verdict(verdict="approve", door="link")


@pytest.fixture
async def smtp() -> AsyncIterator[SmtpServer]:
    async with smtp_server() as running:
        yield running


@pytest.fixture
def mailer(smtp: SmtpServer) -> Mailer:
    return mailer_to(smtp.url)


def mailer_to(url: str, *, step_up_over: Decimal | None = None) -> Mailer:
    return Mailer(
        MailServer.of(url), sender="claims@example.com", url="https://claims.example.com", step_up_over=step_up_over
    )


async def make_due(conn: Connection) -> None:
    await conn.execute("UPDATE links SET mail_due_at = clock_timestamp() WHERE mail_due_at IS NOT NULL")


async def test_each_approver_by_address_gets_a_link_of_their_own_once(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=BY_MAIL)
    assert await mailer.sweep(conn) == (2, 0)
    assert await mailer.sweep(conn) == (0, 0)
    assert sorted(smtp.recipients) == ["john@example.com", MARY]
    for token, address in zip(smtp.tokens(), smtp.recipients, strict=True):
        link = await links.link_of(conn, token)
        assert link is not None and (link.interrupt_id, link.person) == (interrupt_id, f"mail:{address}")
    assert await value(conn, "SELECT bool_and(mailed_at IS NOT NULL AND mail_due_at IS NULL) FROM links")
    assert len(set(smtp.tokens())) == 2


async def test_whoever_has_a_void_vote_is_mailed_a_new_link_and_whoever_has_an_open_one_is_not(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    tier = Tier(name="approval", approvers=(MARY, "john@example.com"), required=2)
    interrupt_id = await put(conn, REFUND, tier=tier)
    await mailer.sweep(conn)
    tokens = dict(zip(smtp.recipients, smtp.tokens(), strict=True))
    await links.spend(conn, tokens[MARY], APPROVE, code="", step_up=False)
    for _ in range(2):
        await refresh(conn, Tiers(rules=(Rule(tier=tier, over={}),)), "q1", by="cli:ann")
    assert await mailer.sweep(conn) == (1, 0)
    assert smtp.recipients[2:] == [MARY]
    for token in (smtp.tokens()[2], tokens["john@example.com"]):
        assert (await links.spend(conn, token, APPROVE, code="", step_up=False)).recorded
    assert (await approval_of(conn, interrupt_id)).status == "approved"


async def test_a_link_that_was_revoked_does_not_come_back_because_the_rules_change(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    tier = Tier(name="approval", approvers=(MARY, "john@example.com"), required=2)
    interrupt_id = await put(conn, REFUND, tier=tier)
    await mailer.sweep(conn)
    await links.revoke_link(conn, await approval_of(conn, interrupt_id), mail_person(MARY), by="cli:ann")
    await refresh(conn, Tiers(rules=(Rule(tier=tier, over={}),)), "q1", by="cli:ann")
    assert await mailer.sweep(conn) == (0, 0)
    assert len(smtp.recipients) == 2


async def test_the_requester_gets_no_mail_however_the_address_is_written(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    await ask(conn, tier=BY_MAIL, requested_by="mail:MARY@example.com")
    await mailer.sweep(conn)
    assert smtp.recipients == ["john@example.com"]


async def test_a_mail_says_the_amount_and_nothing_that_a_claimant_wrote(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    await ask(conn, "www.evil.example", tier=MARY_ALONE, requested_by="https://evil.example")
    await mailer.sweep(conn)
    [mail] = smtp.received
    assert mail["Subject"] == "Approval needed: 250.00 USD"
    assert (mail["From"], mail["To"], mail["Auto-Submitted"]) == ("claims@example.com", MARY, "auto-generated")
    text = mail.get_content()
    assert f"https://claims.example.com/a/{smtp.tokens()[0]}" in text and "250.00 USD" in text
    for said in ("evil", "ACME", "chairs", "code"):
        assert said not in mail.as_string()


async def test_above_the_limit_the_mail_says_that_a_code_is_wanted_and_has_none(
    smtp: SmtpServer, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=MARY_ALONE)
    await mailer_to(smtp.url, step_up_over=Decimal(200)).sweep(conn)
    [mail] = smtp.received
    assert "needs a code too" in mail.get_content()
    [token] = smtp.tokens()
    code = await links.make_code(conn, await approval_of(conn, interrupt_id), mail_person(MARY), by="cli:ann")
    assert code not in mail.get_content().replace(token, "")
    assert (await links.spend(conn, token, APPROVE, code=code, step_up=True)).recorded


async def test_a_mail_that_was_taken_without_an_answer_is_sent_again_and_both_links_are_good_for_one_decision(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    await ask(conn, tier=MARY_ALONE)
    smtp.silences = 1
    assert await mailer.sweep(conn) == (0, 1)
    assert await mailer.sweep(conn) == (0, 0)
    await make_due(conn)
    assert await mailer.sweep(conn) == (1, 0)
    first, second = smtp.tokens()
    assert first != second and smtp.received[0]["Message-ID"] == smtp.received[1]["Message-ID"]
    assert (await links.spend(conn, first, APPROVE, code="", step_up=False)).recorded
    assert not (await links.spend(conn, second, APPROVE, code="", step_up=False)).recorded
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_a_mailer_that_died_is_followed_by_another(smtp: SmtpServer, mailer: Mailer, conn: Connection) -> None:
    await ask(conn, tier=MARY_ALONE)
    dead = await mails.lease_mail(conn)
    assert dead is not None
    assert await mailer.sweep(conn) == (0, 0)
    await make_due(conn)
    assert await mailer.sweep(conn) == (1, 0)
    # What the dead one says after all changes nothing.
    await mails.mark_mail_later(conn, dead, wait_s=0, error="late")
    await mails.mark_mail_failed(conn, dead, "late")
    assert await mailer.sweep(conn) == (0, 0)
    assert await one_row(conn, "SELECT mail_error, mailed_at IS NOT NULL AS mailed FROM links") == {
        "mail_error": None,
        "mailed": True,
    }


async def test_mailers_side_by_side_send_each_mail_once(
    smtp: SmtpServer, mailer: Mailer, conn: Connection, crowd: list[Connection]
) -> None:
    for number in range(6):
        await ask(conn, f"t{number}", tier=MARY_ALONE)
    counts = await asyncio.gather(*[mailer.sweep(each) for each in crowd])
    assert sum(sent for sent, _ in counts) == len(smtp.received) == 6


async def test_a_recipient_who_does_not_exist_is_an_alarm_and_keeps_nobody_waiting(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    await ask(conn, tier=BY_MAIL)
    smtp.bounces = {MARY}
    assert await mailer.sweep(conn) == (1, 1)
    await make_due(conn)
    assert await mailer.sweep(conn) == (0, 0)
    assert smtp.recipients == ["john@example.com"]
    [(kind, error)] = await failures_of(conn, "t1")
    assert kind == "mail" and MARY in error and "no such user" in error
    assert await value(conn, "SELECT count(*) FROM notices WHERE kind = 'alarm'") == 1
    # The mailbox is there now, and somebody says `deliver`.
    smtp.bounces = set()
    assert await mails.retry_mails(conn) == 1
    assert await mailer.sweep(conn) == (1, 0)
    assert await failures_of(conn, "t1") == []


@pytest.mark.parametrize("refusal", ["451 try later", "421 busy"])
async def test_a_server_that_is_busy_is_asked_again_later(
    smtp: SmtpServer, mailer: Mailer, conn: Connection, refusal: str
) -> None:
    await ask(conn, tier=MARY_ALONE)
    smtp.refusals = [refusal]
    assert await mailer.sweep(conn) == (0, 1)
    waiting = await one_row(conn, "SELECT mail_due_at > clock_timestamp() AS later, mail_error FROM links")
    assert waiting["later"] and refusal[4:] in waiting["mail_error"]
    await make_due(conn)
    assert await mailer.sweep(conn) == (1, 0)


@pytest.mark.parametrize(
    "refusal",
    [
        "554 5.7.1 blocked URL https://claims.example.com/a/{token}",
        "451 4.7.1 blocked URL https://claims.example.com/a/{token} for now",
        "554 5.7.1 blocked https://urldefense.example/v3/__https://claims.example.com/a/{token}__;!!x",
        "554-5.7.1 blocked https://claims.example.com/a/{start}\r\n554 5.7.1 {rest}",
        "554 5.7.1 blocked hxxps://claims[.]example[.]com/a/{small}",
        f"554 5.7.1 blocked {'by the rules of this server ' * 8}https://claims.example.com/a/{{token}}",
    ],
    ids=["whole", "for now", "rewritten by a gateway", "in two lines", "in small letters", "cut off at the end"],
)
async def test_a_link_that_a_server_quotes_is_kept_and_told_to_nobody(
    smtp: SmtpServer, mailer: Mailer, conn: Connection, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(conn, tier=MARY_ALONE)
    smtp.refusals = [refusal]
    assert await mailer.sweep(conn) == (0, 1)
    [token] = smtp.refused
    kept = str(await value(conn, "SELECT mail_error FROM links"))
    said = str(blocks.alarm(await thread_of(conn, "t1"), await failures_of(conn, "t1")))
    assert "blocked" in kept and ("blocked" in said) == refusal.startswith("554")
    for text in (kept, said, caplog.text):
        pieces = [token[at : at + 8] for at in range(len(token) - 7)]
        assert not [piece for piece in pieces if piece.lower() in text.lower()]
    # It is as good as before.
    assert (await links.spend(conn, token, APPROVE, code="", step_up=False)).recorded


async def test_a_refusal_in_no_known_letters_is_kept_and_stops_nothing(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    await ask(conn, tier=BY_MAIL)
    smtp.refusals = ["554 Zugriff für Fremde verweigert \0".encode("latin-1")]
    assert await mailer.sweep(conn) == (1, 1)
    assert "Zugriff f\ufffdr Fremde" in await value(conn, "SELECT mail_error FROM links WHERE mail_error IS NOT NULL")


async def test_a_server_that_is_away_is_given_up_after_the_last_try(conn: Connection) -> None:
    await ask(conn, tier=MARY_ALONE)
    mailer = mailer_to(f"smtp://127.0.0.1:{free_port()}")
    for _ in range(mails.MAX_ATTEMPTS):
        await make_due(conn)
        assert await mailer.sweep(conn) == (0, 1)
    await make_due(conn)
    assert await mailer.sweep(conn) == (0, 0)
    assert [kind for kind, _ in await failures_of(conn, "t1")] == ["mail"]


async def test_nothing_is_mailed_that_nobody_needs_any_more(smtp: SmtpServer, mailer: Mailer, conn: Connection) -> None:
    settled, expired, revoked = [await ask(conn, name, tier=BY_MAIL) for name in ("settled", "expired", "revoked")]
    await decide(conn, settled, ALICE, YES)
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp() WHERE interrupt_id = %s", (expired,))
    for address in (MARY, "john@example.com"):
        await links.revoke_link(conn, await approval_of(conn, revoked), mail_person(address), by="cli:ann")
    assert await mailer.sweep(conn) == (0, 0)
    assert smtp.received == []
    assert await waiting_mails(conn) == (0, 0)


async def test_a_mail_that_waits_counts_as_long_as_somebody_needs_it(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=MARY_ALONE)
    await conn.execute("UPDATE links SET made_at = made_at - interval '1 hour'")
    an_hour: Any = pytest.approx(3600, abs=60)
    assert await waiting_mails(conn) == (1, an_hour)
    await decide(conn, interrupt_id, ANN, YES)
    assert await waiting_mails(conn) == (0, 0)


async def test_a_mail_that_failed_for_good_is_told_until_nobody_needs_it(
    smtp: SmtpServer, mailer: Mailer, conn: Connection, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(
        database_url=SecretStr(database_url),
        smtp_url=SecretStr(smtp.url),
        mail_from="claims@example.com",
        public_url="https://claims.example.com",
    )

    async def told() -> tuple[float, Finding]:
        named = {figure.name: figure.values for figure in await figures(conn, slack=False, mail=True)}
        [found] = [each async for each in examine(settings) if each.what == "mails"]
        return named["claim_flow_refused_notices"]["mail",], found

    interrupt_id = await ask(conn, tier=BY_MAIL)
    assert await told() == (0, Finding(what="mails", ok=True, found="none failed"))
    smtp.bounces = {MARY}
    assert await mailer.sweep(conn) == (1, 1)
    count, found = await told()
    assert (count, found.ok) == (1, False)
    assert found.found.startswith(f"1 failed for good; the first, of thread t1 to {MARY}: SMTPRecipientsRefused: ")
    assert "claim_flow.py deliver" in found.fix
    [said] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"thread t1: the mail to {MARY} failed for good: " in said.message
    # Somebody brings her a link.
    await links.make_link(conn, await approval_of(conn, interrupt_id), mail_person(MARY), by="cli:ann", with_code=False)
    assert (await told())[0] == 0


async def test_a_mail_that_failed_is_not_sent_again_once_the_request_is_decided(
    smtp: SmtpServer, mailer: Mailer, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=MARY_ALONE)
    smtp.bounces = {MARY}
    assert await mailer.sweep(conn) == (0, 1)
    await decide(conn, interrupt_id, ANN, YES)
    assert await mails.retry_mails(conn) == 0


async def test_a_request_that_is_not_committed_mails_nobody(smtp: SmtpServer, mailer: Mailer, conn: Connection) -> None:
    await break_table(conn, "links", "INSERT", "RAISE EXCEPTION 'no'")
    with pytest.raises(psycopg.errors.RaiseException):
        await ask(conn, tier=MARY_ALONE)
    await mend_table(conn)
    assert await all_rows(conn, "SELECT * FROM approvals") == await all_rows(conn, "SELECT * FROM links") == []
    assert await mailer.sweep(conn) == (0, 0)


# The server


async def test_user_and_password_are_sent_as_they_were_before_the_url(conn: Connection) -> None:
    await ask(conn, tier=MARY_ALONE)
    async with smtp_server(with_login=True) as smtp:
        url = f"smtp://{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@127.0.0.1:{smtp.port}"
        assert await mailer_to(url).sweep(conn) == (1, 0)
        assert smtp.logins == [(USER, PASSWORD)]


async def test_a_wrong_password_is_mended_by_somebody_and_the_mail_is_sent_then(conn: Connection) -> None:
    await ask(conn, tier=MARY_ALONE)
    async with smtp_server(with_login=True) as smtp:
        assert await mailer_to(f"smtp://x:y@127.0.0.1:{smtp.port}").sweep(conn) == (0, 1)
        assert await failures_of(conn, "t1") == []
        await make_due(conn)
        url = f"smtp://{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@127.0.0.1:{smtp.port}"
        assert await mailer_to(url).sweep(conn) == (1, 0)


@pytest.mark.parametrize(
    ("url", "port", "tls", "start_tls"),
    [
        ("smtp://mail.example.com", 587, False, True),
        ("smtp://mail.example.com:25", 25, False, True),
        ("smtps://mail.example.com", 465, True, False),
        ("smtp://127.0.0.1:25", 25, False, None),
        ("smtp://localhost", 587, False, None),
    ],
)
def test_only_to_this_machine_a_mail_may_go_without_tls(url: str, port: int, tls: bool, start_tls: bool | None) -> None:
    server = MailServer.of(url)
    assert (server.port, server.tls, server.start_tls) == (port, tls, start_tls)


async def test_a_server_without_tls_gets_neither_password_nor_link(smtp: SmtpServer, conn: Connection) -> None:
    await ask(conn, tier=MARY_ALONE)
    server = MailServer(host="127.0.0.1", port=smtp.port, user=USER, password=PASSWORD, tls=False, start_tls=True)
    mailer = Mailer(server, sender="claims@example.com", url="https://claims.example.com", step_up_over=None)
    assert await mailer.sweep(conn) == (0, 1)
    assert smtp.received == [] and smtp.logins == []


def test_an_amount_that_is_none_is_no_header_of_its_own() -> None:
    mail = Mail(
        link_id=1,
        interrupt_id="0" * 32,
        thread_id="t1",
        address=MARY,
        token="A" * 43,
        request={"amount": "1\nBcc: eve@example.com", "currency": "USD"},
        attempt=1,
    )
    message = message_of(mail, sender="claims@example.com", url="https://claims.example.com", step_up_over=None)
    assert message["Bcc"] is None and message["Subject"] == "Approval needed: no amount"


# Whole


async def test_a_running_service_mails_a_link_that_decides_and_is_paid(
    smtp: SmtpServer, database_url: str, conn: Connection, tmp_path: Path
) -> None:
    async with pages_in_process(database_url) as site, Visitor(site.url) as mary:
        settings = {"SMTP_URL": smtp.url, "MAIL_FROM": "claims@example.com", "PUBLIC_URL": site.url, "STAND_BY": "1"}
        terminal = Terminal(tmp_path, DATABASE_URL=database_url, APPROVERS=MARY, **settings)
        async with terminal.service("work") as worker:
            await start_claim(conn)

            async def came() -> bool:
                return bool(smtp.received)

            await worker.until(came)
            path = f"/a/{smtp.tokens()[0]}"
            page = await mary.get(path)
            assert (await mary.post(path, page.form("Approve").fields | {"verdict": "approve"})).status == 303

            async def paid() -> bool:
                return bool(await all_rows(conn, "SELECT FROM payments"))

            await until(paid, within_s=60)
            assert smtp.tokens()[0] not in worker.err


async def test_deliver_and_start_send_mails_where_nothing_runs(
    smtp: SmtpServer, database_url: str, conn: Connection, tmp_path: Path
) -> None:
    settings = {"SMTP_URL": smtp.url, "MAIL_FROM": "claims@example.com", "PUBLIC_URL": "https://claims.example.com"}
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, APPROVERS=MARY, **settings)
    started = await terminal.run_meanwhile("start", "--thread", "t1", "--amount", "250")
    assert started.code == 0, started.err
    assert smtp.recipients == [MARY]
    await ask(conn, "t2", tier=MARY_ALONE)
    delivered = await terminal.run_meanwhile("deliver")
    assert (delivered.code, delivered.out) == (0, "1 sent, 0 not\n"), delivered.err


async def test_the_operators_are_told_whom_a_mail_does_not_reach(conn: Connection) -> None:
    await ask(conn, tier=MARY_ALONE)
    said = blocks.alarm(await thread_of(conn, "t1"), [("mail", f"{MARY}: <no> such user")])
    assert said is not None and MARY in said and "&lt;no&gt; such user" in said and "claim_flow.py link" in said


async def waiting_mails(conn: Connection) -> tuple[float, float]:
    """How many mails the figures say wait, and since how many seconds the first of them does."""
    named = {figure.name: figure.values for figure in await figures(conn, slack=False, mail=True)}
    kinds = (named["claim_flow_waiting_notices"], named["claim_flow_oldest_waiting_notice_seconds"])
    return kinds[0]["mail",], kinds[1]["mail",]
