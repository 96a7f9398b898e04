"""The suite's own test: one-line bugs, each planted in a copy of the code, must turn the named tests red.

Slow, so it runs by its marker and before a release: `pytest -m planted`. Whoever changes a line that a bug is planted
in gets to know of it: each must be found exactly once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT


@dataclass(frozen=True, kw_only=True)
class Bug:
    """`old` becomes `new` in `file`, and one of `tests` (files, or tests in them) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return self.name


BUGS = [
    Bug(
        name="a click is acknowledged before it is committed",
        file="bot/slack.py",
        old="note = await _decide(door, click)",
        new="note = door.spawn(_decide(door, click)) and None",
        tests="test_slack_clicks.py",
    ),
    Bug(
        name="a click that could not be committed is acknowledged",
        file="bot/slack.py",
        old='return BoltResponse(status=503, body="not recorded")',
        new='return BoltResponse(status=200, body="not recorded")',
        tests="test_slack_clicks.py",
    ),
    Bug(
        name="requests are not verified",
        file="bot/slack.py",
        old="if not is_signed(signing_secret, request.headers, body, now=time.time()):",
        new="if not request.headers:",
        tests="test_slack_requests.py",
    ),
    Bug(
        name="old signatures are good for ever",
        file="bot/slack.py",
        old="if abs(now - int(timestamp)) > _TOLERANCE_S:",
        new="if abs(now - int(timestamp)) < 0:",
        tests="test_slack_requests.py",
    ),
    Bug(
        name="a bare member id names members of every team",
        file="bot/people.py",
        old="    if team_id in own_team:\n        names |=",
        new="    if own_team:\n        names |=",
        tests="test_slack_clicks.py",
    ),
    Bug(
        name="whoever stood in when the page was opened stands in for ever",
        file="flow/approvals.py",
        old="return check_person(approval, replace(person, acts_for=()))",
        new="return check_person(approval, person)",
        tests="test_delegations.py::test_whom_a_page_knew_as_away_is_back_at_the_decision",
    ),
    Bug(
        name="what was changed past us waits for people",
        file="flow/inbox.py",
        old="    if not approval.is_open or over:",
        new='    if approval.status != "pending" or over:',
        tests="test_away.py::test_lists_counts_and_decisions_agree_for_everybody_and_their_delegates",
    ),
    Bug(
        name="an alarm forgets what was put back",
        file="flow/notices.py",
        old="(SELECT unnest(reasons) FROM notices",
        new="(SELECT NULL::text FROM notices",
        tests="test_deliver.py::test_that_a_request_was_changed_past_us_is_told_though_it_was_put_back",
    ),
    Bug(
        name="guests are sent the copy of whoever is away",
        file="bot/places.py",
        old="        may = [each for each in stood_in if await self._team.may_stand_in(each.delegate)]",
        new="        may = list(stood_in)",
        tests="test_direct.py::test_a_delegate_who_may_not_decide_gets_no_copy_and_no_reminder_names_them",
    ),
    Bug(
        name="a thread has no lock",
        file="flow/threads.py",
        old='    return bool(row["got"])',
        new="    return True",
        tests="test_drive.py test_many_at_once.py",
    ),
    Bug(
        name="what has happened before the lock was taken is not looked at",
        file="flow/threads.py",
        old='" WHERE thread_id = %s AND status <> ALL(%s) AND attempts < %s"',
        new='" WHERE thread_id = %s AND %s::text[] IS NOT NULL AND attempts < %s"',
        tests="test_drive.py",
    ),
    Bug(
        name="a drive ends although it was woken meanwhile",
        file="flow/threads.py",
        old="WHERE thread_id = %(thread_id)s AND wakes = %(wakes)s",
        new="WHERE thread_id = %(thread_id)s AND %(wakes)s >= 0",
        tests="test_drive.py test_many_at_once.py",
    ),
    Bug(
        name="attempts are not counted",
        file="flow/threads.py",
        old="driven_at = clock_timestamp(), attempts = attempts + 1,",
        new="driven_at = clock_timestamp(), attempts = attempts,",
        tests="test_drive_hazards.py",
    ),
    Bug(
        name="a driver that overstays is never evicted",
        file="flow/threads.py",
        old="SELECT pg_terminate_backend(l.pid, 2000) AS gone",
        new="SELECT l.pid < 0 AS gone",
        tests="test_kills.py::test_a_command_that_stood_still_for_too_long_writes_nothing_more",
    ),
    Bug(
        name="a thread that is reopened while it is pruned loses its checkpoints",
        file="flow/retention.py",
        old='f"{_OVER_FOR_LONG} ORDER BY ended_at, thread_id LIMIT %(most)s FOR UPDATE SKIP LOCKED",',
        new='f"{_OVER_FOR_LONG} ORDER BY ended_at, thread_id LIMIT %(most)s",',
        tests="test_retention.py::test_a_thread_that_becomes_due_before_it_is_listed_is_left_alone",
    ),
    Bug(
        name="a thread's lock is not asked before its checkpoints are deleted",
        file="flow/retention.py",
        old='" WHERE pg_try_advisory_xact_lock(hashtextextended(thread_id, 0))",',
        new='" WHERE hashtextextended(thread_id, 0) IS NOT NULL",',
        tests="test_retention.py::test_whoever_has_a_threads_lock_keeps_its_checkpoints",
    ),
    Bug(
        name="a delivery that is to be sent again is deleted",
        file="flow/retention.py",
        old="delivered = \"t.event_id = ANY(%(events)s) AND t.status = 'sent'\"",
        new='delivered = "t.event_id = ANY(%(events)s)"',
        tests="test_retention.py::test_an_event_that_becomes_due_again_meanwhile_stays",
    ),
    Bug(
        name="an event goes before every endpoint has come to it",
        file="flow/retention.py",
        old=" <= (SELECT coalesce(min(position), 9223372036854775807) FROM",
        new=" <= (SELECT coalesce(max(position), 9223372036854775807) FROM",
        tests="test_retention.py::test_an_event_that_an_endpoint_has_not_come_to_stays",
    ),
    Bug(
        name="whoever reads on skips what is forgotten",
        file="flow/events.py",
        old='if 0 < position < row["events_forgotten"]:',
        new='if 0 < position < row["events_forgotten"] < 0:',
        tests="test_retention.py::test_who_reads_on_hears_if_something_was_missed",
    ),
    Bug(
        name="the flow is resumed without an interrupt id",
        file="flow/run.py",
        old="return Command(resume=answers) if",
        new="return Command(resume=next(iter(answers.values()))) if",
        tests="test_drive.py test_drive_hazards.py",
    ),
    Bug(
        name="a thread that looks finished is finished",
        file="flow/drive.py",
        old="    if state.tasks:\n        return await run.on(None)",
        new="    if state.next:\n        return await run.on(None)",
        tests="test_drive_hazards.py",
    ),
    Bug(
        name="a truthy answer is an approval",
        file="flow/claims.py",
        old='approved = isinstance(verdict, dict) and verdict.get("approved") is True',
        new="approved = bool(verdict)",
        tests="test_drive_hazards.py",
    ),
    Bug(
        name="what was approved is not checked before the payment",
        file="flow/claims.py",
        old="approvals = await _check_approved(conn, state, claim)\n",
        new="approvals = (await approvals_of(conn, [thread_id]))[thread_id]\n",
        tests="test_drive_hazards.py",
    ),
    Bug(
        name="payments have no unique key",
        file="flow/migrations/0001_threads_approvals_payments.sql",
        old='thread_id text COLLATE "C" NOT NULL UNIQUE REFERENCES threads,',
        new='thread_id text COLLATE "C" NOT NULL REFERENCES threads,',
        tests="test_drive.py test_database.py",
    ),
    Bug(
        name="each attempt to pay outside has a key of its own",
        file="flow/payments.py",
        old="        key=payment.idempotency_key,",
        new='        key=f"{payment.idempotency_key}:{payment.attempts}",',
        tests="test_payments.py",
    ),
    Bug(
        name="a key that may be forgotten is used again",
        file="flow/payments.py",
        old="must = payment.attempts > 1 and before.payment_s > remembered_s",
        new="must = payment.attempts > 100",
        tests="test_payments.py",
    ),
    Bug(
        name="an order that may be on its way is taken for lost",
        file="flow/payments.py",
        old="before.asked_s < provider.timeout_s + _BOOKED_WITHIN_S",
        new="before.asked_s < 0",
        tests="test_payments.py",
    ),
    Bug(
        name="only the first order has the time to arrive",
        file="flow/payments.py",
        old="now - coalesce(p.asked_at, p.intended_at)",
        new="now - p.intended_at",
        tests="test_payments.py",
    ),
    Bug(
        name="a refusal is believed after an order that was not answered",
        file="flow/payments.py",
        old="if payment.attempts == 1 or provider.answers_by_key:",
        new="if True:",
        tests="test_payments.py",
    ),
    Bug(
        name="the intent is not committed before the call",
        file="flow/claims.py",
        old='    if payment.status == "intended":\n        payment',
        new='        if payment.status == "intended" and pen.provider is not None:\n'
        "            await pen.provider.pay(payments.Order(key=str(payment.idempotency_key), thread_id=thread_id,"
        " amount=claim.amount, currency=claim.currency, payee=claim.payee))\n"
        '    if payment.status == "intended":\n        payment',
        tests="test_payments.py",
    ),
    Bug(
        name="Stripe's retries are left on",
        file="flow/stripe_provider.py",
        old="max_network_retries=0,",
        new="max_network_retries=2,",
        tests="test_stripe.py",
    ),
    Bug(
        name="a decision does not look again under the lock",
        file="flow/approvals.py",
        old="await approval_for(conn, person, interrupt_id, lock=True)\n        standing = await _checked",
        new="await approval_for(conn, person, interrupt_id)\n        standing = await _checked",
        tests="test_approvals.py",
    ),
    Bug(
        name="anybody decides",
        file="flow/standing.py",
        old="    return next((name for name in approval.approvers if name in names), None)",
        new="    return next(iter(names), None)",
        tests="test_approvals.py",
    ),
    Bug(
        name="everybody may decide their own request",
        file="flow/standing.py",
        old="    if asks and not approval.self_approval:",
        new="    if not person.names:",
        tests="test_approvals.py",
    ),
    Bug(
        name="what the person was shown does not matter",
        file="flow/approvals.py",
        old="    if request_hash not in (None, approval.request_hash):",
        new='    if request_hash == "":',
        tests="test_approvals.py",
    ),
    Bug(
        name="what was changed past us is decided",
        file="flow/approvals.py",
        old="    if not approval.whole:\n        raise Tampered(approval.interrupt_id)\n    standing",
        new="    standing",
        tests="test_rules.py",
    ),
    Bug(
        name="a click approves what takes the page",
        file="flow/approvals.py",
        old='        if approval.step_up and (verdict.door, verdict.verdict) == ("slack", "approve"):',
        new='        if approval.step_up and (verdict.door, verdict.verdict) == ("slack", "yes"):',
        tests="test_rules.py",
    ),
    Bug(
        name="a request escalates for ever",
        file="flow/standing.py",
        old='    return approval.on_expiry == "escalate" and approval.escalated_at is None',
        new='    return approval.on_expiry == "escalate"',
        tests="test_rules.py",
    ),
    Bug(
        name="a delegate is a second voice",
        file="flow/model.py",
        old="        return bare_name(self.for_person or self.person)",
        new="        return bare_name(self.person)",
        tests="test_delegations.py",
    ),
    Bug(
        name="people decide through a delegate what they asked for",
        file="flow/standing.py",
        old="    if is_requester(approval.requested_by, away) or names_person(approval.raised_by, away):",
        new="    if names_person(approval.raised_by, away):",
        tests="test_delegations.py",
    ),
    Bug(
        name="whoever raised an amount decides it",
        file="flow/standing.py",
        old="    if raised and not approval.self_approval:",
        new="    if not person.names:",
        tests="test_changes.py",
    ),
    Bug(
        name="a lower amount is paid unasked",
        file="flow/claims.py",
        old='(state["needs_review"] or state.get("changed"))',
        new='state["needs_review"]',
        tests="test_changes.py",
    ),
    Bug(
        name="earlier votes stand for another amount",
        file="flow/changes.py",
        old="AND (status = 'approved' OR interrupt_id = %s)",
        new="AND interrupt_id = %s",
        tests="test_changes.py",
    ),
    Bug(
        name="votes stand although the rules are others",
        file="flow/changes.py",
        old="UPDATE decisions SET void = true",
        new="UPDATE decisions SET void = false",
        tests="test_changes.py",
    ),
    Bug(
        name="a refusal leaves no trace",
        file="flow/approvals.py",
        old="    except _REFUSALS as exc:",
        new="    except Tampered as exc:",
        tests="test_rules.py",
    ),
    Bug(
        name="a decision does not wake its thread",
        file="flow/approvals.py",
        old="    assert row is not None\n    await threads.wake(conn, approval.thread_id)",
        new="    assert row is not None",
        tests="test_approvals.py test_drive.py",
    ),
    Bug(
        name="a second verdict replaces the first",
        file="flow/approvals.py",
        old="[verdict.verdict]:\n        return",
        new="[verdict.verdict] or approval:\n        return",
        tests="test_approvals.py",
    ),
    Bug(
        name="Slack's retries are left on",
        file="bot/slack_api.py",
        old="        retry_handlers=[],\n",
        new="",
        tests="test_deliver.py",
    ),
    Bug(
        name="a message whose posting got no answer is posted again without a look",
        file="bot/outlet.py",
        old="        if notice.ambiguous and (found := await",
        new="        if notice.version < 0 and (found := await",
        tests="test_deliver.py",
    ),
    Bug(
        name="a card is changed as it was posted, not as it is",
        file="bot/outlet.py",
        old="        copies = await self._update(conn, notice, copies, refusals, text=text, blocks=shown)",
        new="        copies = await self._update(conn, notice, copies, refusals, text=text)",
        tests="test_deliver.py",
    ),
    Bug(
        name="what is tried again begins at the first copy",
        file="bot/outlet.py",
        old="enumerate(copy for copy in copies if not copy.has(notice))",
        new="enumerate(copies)",
        tests="test_many_approvers.py",
    ),
    Bug(
        name="Slack's wish for quiet is not heard",
        file="bot/deliver.py",
        old="        while None not in (quiet := _still(self._quiet_until)) and clock() < deadline:",
        new="        while (quiet := _still(self._rests_until)) is not None and clock() < deadline:",
        tests="test_deliver.py",
    ),
    Bug(
        name="a deliverer whose lease ran out records what another one sent",
        file="flow/notices.py",
        old="""ambiguous = false, error = NULL WHERE id = %(id)s AND attempt = %(attempt)s AND status = 'sending'""",
        new="""ambiguous = false, error = NULL WHERE id = %(id)s AND %(attempt)s > 0""",
        tests="test_notices.py",
    ),
    Bug(
        name="a card that changed while it was shown is not shown again",
        file="flow/notices.py",
        old='''(UPDATE notices SET status = CASE WHEN version = %(version)s THEN 'sent' ELSE 'pending' END,"
        " due_at = CASE WHEN version = %(version)s THEN NULL ELSE clock_timestamp() END,"''',
        new='''(UPDATE notices SET status = CASE WHEN %(version)s > 0 THEN 'sent' ELSE 'pending' END,"
        " due_at = CASE WHEN %(version)s > 0 THEN NULL ELSE clock_timestamp() END,"''',
        tests="test_notices.py",
    ),
    Bug(
        name="a thread that is stuck calls nobody",
        file="flow/drive.py",
        old="    if status in _NEEDS_A_PERSON:\n        await notices.raise_alarm(conn, thread_id)\n",
        new="",
        tests="test_drive_hazards.py",
    ),
    Bug(
        name="the ear is not opened again after an outage",
        file="flow/database.py",
        old="                await listen(conn)\n                pause = 0.1",
        new="                if pause == 0.1:\n                    await listen(conn)",
        tests="test_database.py",
    ),
    Bug(
        name="children live on when their worker dies",
        file="flow/standby.py",
        old="                lines.read()\n        # The worker",
        new="                return\n        # The worker",
        tests="test_kills.py::test_a_standby_that_is_let_go_in_the_midst_of_its_drive_ends",
    ),
    Bug(
        name="equal calls are one effect",
        file="flow/effects.py",
        old="number = next(number for number in itertools.count() if number not in taken)",
        new="number = 0",
        tests="test_effects.py",
    ),
    Bug(
        name="equal calls are counted on when a node runs again",
        file="flow/effects.py",
        old="run=(info.checkpoint_ns, info.task_id, info.node_attempt),",
        new="run=(),",
        tests="test_effects.py",
    ),
    Bug(
        name="a call that may be under way is made again",
        file="flow/effects.py",
        old=''' WHERE e.status = 'started' AND e.lease_until <= clock_timestamp()"''',
        new=''' WHERE e.status = 'started'"''',
        tests="test_effects.py",
    ),
    Bug(
        name="the context does not travel into thread pools",
        file="flow/effects.py",
        old="return submit(self, contextvars.copy_context().run, fn, *args, **kwargs)",
        new="return submit(self, fn, *args, **kwargs)",
        tests="test_effects.py",
    ),
    Bug(
        name="events are read in the order of their ids",
        file="flow/events.py",
        old="nextval('events_position') AS position",
        new="id AS position",
        tests="test_events.py",
    ),
    Bug(
        name="a new endpoint is told everything that ever happened",
        file="flow/deliveries.py",
        old="SELECT coalesce(max(position), 0) FROM events",
        new="SELECT 0",
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="traces have no bounds to a request",
        file="bot/traces_out.py",
        old="if batch.spans and (size > MOST_BYTES or len(batch.spans) == MOST_SPANS):",
        new="if batch.spans and size < 0:",
        tests="test_traces_out.py::test_a_thousand_threads_do_not_make_one_request"
        " test_traces_out.py::test_a_thread_of_many_spans_takes_several_requests",
    ),
    Bug(
        name="what is new while a trace is sent is taken for sent",
        file="flow/exports.py",
        old='" due_at = CASE WHEN version > %(version)s OR NOT %(last)s THEN clock_timestamp() END"',
        new='" due_at = CASE WHEN %(version)s < 0 OR NOT %(last)s THEN clock_timestamp() END"',
        tests="test_traces_out.py::test_what_is_new_while_a_request_is_on_its_way_is_sent_after_it",
    ),
    Bug(
        name="a refused key is an alarm each time",
        file="flow/exports.py",
        old=" AND name = %s AND alarm_of IS NULL",
        new=" AND name = %s",
        tests="test_traces_out.py::test_a_key_that_is_refused_is_an_alarm_once_until_it_worked",
    ),
    Bug(
        name="traces are given up when a key is refused",
        file="bot/traces_out.py",
        old="        elif status in _CLOSED or status < 400:",
        new="        elif status < 400:",
        tests="test_traces_out.py::test_a_key_that_is_refused_is_an_alarm_once_until_it_worked",
    ),
    Bug(
        name="secrets go out in traces",
        file="bot/otlp.py",
        old='return {"stringValue": hide(value if isinstance(value, str) else json.dumps(value))}',
        new='return {"stringValue": value if isinstance(value, str) else json.dumps(value)}',
        tests="test_traces_out.py::test_no_secret_goes_out_whoever_wrote_it_into_a_span",
    ),
    Bug(
        name="a webhook's deliverer has no fence",
        file="flow/deliveries.py",
        old=" AND attempt = %(attempt)s AND status = 'sending'",
        new=" AND attempt >= 0 * %(attempt)s AND status = 'sending'",
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="a webhook has another id at each attempt",
        file="bot/webhooks_out.py",
        old='return f"evt_{delivery.event.id}_{delivery.endpoint}"',
        new='return f"evt_{delivery.event.id}_{delivery.endpoint}_{delivery.attempt}"',
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="redirects of webhooks are followed",
        file="bot/webhooks_out.py",
        old="allow_redirects=False",
        new="allow_redirects=True",
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="of a webhook's addresses only the first is checked",
        file="bot/webhooks_out.py",
        old="        for address in addresses:\n",
        new="        for address in addresses[:1]:\n",
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="an address that is written in a webhook's URL is not checked",
        file="bot/webhooks_out.py",
        old="        if not is_allowed(address[0]):\n",
        new="        if not is_allowed and address:\n",
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="a webhook's name is not looked up again",
        file="bot/webhooks_out.py",
        old="        use_dns_cache=False,\n",
        new="        use_dns_cache=True,\n",
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="Retry-After is read and not obeyed",
        file="bot/webhooks_out.py",
        old="wait_s=max(wait_s, answer.retry_after_s or 0.0),",
        new="wait_s=wait_s,",
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="an endpoint that is gone is asked on",
        file="flow/deliveries.py",
        old='            "UPDATE webhook_endpoints SET turned_off_at = clock_timestamp(), reason = %s"\n',
        new='            "UPDATE webhook_endpoints SET turned_off_at = NULL, reason = left(%s, 0)"\n',
        tests="test_webhooks_out.py",
    ),
    Bug(
        name="a form may come from any page",
        file="bot/site.py",
        old="if not ours and not silent:",
        new="if not origins:",
        tests="test_pages.py::test_a_decision_that_is_not_whole_is_refused",
    ),
    Bug(
        name="any form token is good",
        file="bot/site.py",
        old='if not _same(form.one("form_token"), self.form_token(holder)):',
        new='if not form.one("form_token"):',
        tests="test_pages.py::test_a_decision_that_is_not_whole_is_refused",
    ),
    Bug(
        name="the signature of a cookie is not looked at",
        file="bot/site.py",
        old="return text if dot and _same(mac, self._mac(use, text)) else None",
        new="return text if dot else None",
        tests="test_pages.py::test_a_decision_that_is_not_whole_is_refused",
    ),
    Bug(
        name="a page's form decides whatever the request is by now",
        file="bot/forms.py",
        old="reason=reason_of(form), request_hash=request_hash, answer=answer)",
        new="reason=reason_of(form), answer=answer)",
        tests="test_pages.py::test_a_decision_that_is_not_whole_is_refused",
    ),
    Bug(
        name="a form in Slack decides whatever the question is by now",
        file="bot/modals.py",
        old="request_hash=press.request_hash, answer=answer)",
        new="answer=answer)",
        tests="test_change_modal.py",
    ),
    Bug(
        name="the reason of a rejection is dropped",
        file="bot/modals.py",
        old='verdict = Verdict(verdict="reject", door="slack", reason=reason, request_hash=press.request_hash)',
        new='verdict = Verdict(verdict="reject", door="slack", request_hash=press.request_hash)',
        tests="test_modals.py",
    ),
    Bug(
        name="a modal opens when the database has answered",
        file="bot/modals.py",
        old="        view = await door.open(body, skeleton(title))",
        new="        await door.act(press, lambda conn, person: fill(conn, person, press))"
        "\n        view = await door.open(body, skeleton(title))",
        tests="test_modals.py::test_a_modal_opens_while_the_database_is_busy_and_is_filled_when_it_answers",
    ),
    Bug(
        name="the card of what was superseded says what was paid instead",
        file="bot/outcomes.py",
        old='    if approval.status == "superseded":\n        return [superseded_line(approval)]\n    if payment',
        new="    if payment",
        tests="test_blocks.py",
    ),
    Bug(
        name="arguments that were changed are dropped when it is approved as it is",
        file="bot/answers.py",
        old="    elif _is_changed(action, typed):\n",
        new="    elif False:\n",
        tests="test_change_modal.py",
    ),
    Bug(
        name="signing out only drops the cookie",
        file="flow/sessions.py",
        old='"DELETE FROM sessions WHERE token_sha256 = %s"',
        new='"SELECT FROM sessions WHERE token_sha256 = %s"',
        tests="test_pages.py::test_a_decision_that_is_not_whole_is_refused",
    ),
    Bug(
        name="a search finds what somebody may not see",
        file="flow/inbox.py",
        old="    if names_person(viewers, person):\n        return []\n",
        new="    if viewers is not None:\n        return []\n",
        tests="test_pages.py::test_a_search_shows_nobody_what_they_may_not_see",
    ),
    Bug(
        name="a delegate's list holds what whoever is away asked for",
        file="flow/inbox.py",
        old='" AND NOT lower(approvals.requested_by) = ANY({lowered})"',
        new='" AND {lowered} IS NOT NULL"',
        tests="test_away.py",
    ),
    Bug(
        name="a list in Slack is taken for a copy of a card",
        file="bot/slack_home.py",
        old='"message_ts": None}',
        new="}",
        tests="test_claims_command.py",
    ),
    Bug(
        name="a form that is sent twice files two claims",
        file="bot/filing.py",
        old="sha256(f'{team_id}/{view_id}'.encode())",
        new="sha256(__import__('os').urandom(8))",
        tests="test_filing.py",
    ),
    Bug(
        name="many approvals at once forget what was shown",
        file="bot/home.py",
        old="request_hash=digest, label=",
        new="request_hash='0' * 64, label=",
        tests="test_home.py",
    ),
    Bug(
        name="a link is good for ever",
        file="flow/links.py",
        old='"UPDATE links SET used_at = clock_timestamp() WHERE id = %s"',
        new='"UPDATE links SET used_at = NULL WHERE id = %s"',
        tests="test_links.py::test_two_browsers_with_one_link_make_one_decision",
    ),
    Bug(
        name="wrong codes are not counted",
        file="flow/links.py",
        old="SET code_tries = code_tries + 1",
        new="SET code_tries = code_tries",
        tests="test_links.py::test_tries_at_once_are_all_counted",
    ),
    Bug(
        name="only the newest mail's link is good",
        file="flow/mails.py",
        old="tokens_sha256 = l.tokens_sha256 || %(digest)s::bytea",
        new="tokens_sha256 = ARRAY[%(digest)s::bytea]",
        tests="test_mail.py",
    ),
    Bug(
        name="a token of another sign-in is good",
        file="bot/openid.py",
        old='nonce={"essential": True, "value": nonce},',
        new='nonce={"essential": True},',
        tests="test_openid.py::test_a_token_that_is_not_for_this_sign_in_signs_nobody_in",
    ),
    Bug(
        name="a sign-in may end in another browser than it began in",
        file="bot/openid.py",
        old="if not hmac.compare_digest(state.encode()",
        new='if not state or not hmac.compare_digest(request.query["state"].encode()',
        tests="test_openid.py::test_coming_back_to_another_browser_or_too_late_signs_nobody_in",
    ),
    Bug(
        name="a rejection of an unknown question is true",
        file="flow/questions.py",
        old="        # A dict would be true whatever it says.\n        return approved\n",
        new='        return {"approved": approved}\n',
        tests="test_flows.py::test_a_plain_interrupt_is_shown_as_json_and_answered_with_true_or_false",
    ),
    Bug(
        name="what is asked is not compared with what was approved",
        file="flow/drive.py",
        old="and not flow.pays and not settled_the_same(asked, approval)",
        new="and flow is None",
        tests="test_flows.py::test_what_was_approved_in_another_form_does_not_go_on",
    ),
    Bug(
        name="a thread is driven by another version of its flow",
        file="flow/flows.py",
        old="return self._flows.get(thread.flow_key)",
        new="return next((flow for flow in self if flow.name == thread.flow), None)",
        tests="test_flows.py::test_a_thread_whose_version_is_not_here_is_left_alone_and_goes_on_when_it_is",
    ),
    Bug(
        name="an answer is given once more to a step that failed after it",
        file="flow/run.py",
        old="return Command(resume=answers) if given.isdisjoint(answers) else None",
        new="return Command(resume=answers)",
        tests="test_flows.py",
    ),
    Bug(
        name="a slice ends inside a step",
        file="flow/run.py",
        old='elif mode == "tasks" and not within and moved and clock() >= self._until:',
        new="elif not within and moved and clock() >= self._until:",
        tests="test_flows.py",
    ),
    Bug(
        name="a branch that failed is forgotten beside one that asks",
        file="flow/drive.py",
        old="if state.interrupts and not run.leaves_behind(state):",
        new="if state.interrupts:",
        tests="test_flows.py::test_a_branch_that_failed_beside_one_that_asks_is_tried_again_before_the_thread_waits",
    ),
    Bug(
        name="those who approve may say different things",
        file="flow/approvals.py",
        old="canonical(other.answer) != canonical(answer):",
        new="other is None:",
        tests="test_change_modal.py",
    ),
    Bug(
        name="what no checkpoint holds is stored by halves",
        file="flow/saver.py",
        old="            check_kept(value)\n",
        new="            pass\n",
        tests="test_keeping.py",
    ),
    Bug(
        name="what was recorded can be changed",
        file="flow/migrations/0013_audit.sql",
        old="CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit\n",
        new="CREATE TRIGGER audit_append_only BEFORE DELETE OR TRUNCATE ON audit\n",
        tests="test_audit.py",
    ),
    Bug(
        name="what is committed late is never sealed",
        file="flow/audit.py",
        old=" ORDER BY u.audit_id LIMIT %s",
        new=" WHERE u.audit_id > (SELECT coalesce(max(audit_id), 0) FROM audit_seals) ORDER BY u.audit_id LIMIT %s",
        tests="test_audit.py",
    ),
    Bug(
        name="what is not due yet is read at each look",
        file="flow/threads.py",
        old="AND due_at <= statement_timestamp()",
        new="AND due_at <= clock_timestamp()",
        tests="test_plans.py",
    ),
    Bug(
        name="all events are read at each bell",
        file="flow/deliveries.py",
        old="(SELECT max(position) FROM events) > position",
        new="EXISTS (SELECT FROM events e WHERE e.position > webhook_endpoints.position)",
        tests="test_plans.py",
    ),
    Bug(
        name="sealers do not exclude each other",
        file="flow/audit.py",
        old="        if not await try_lock_until_commit(conn, Lock.AUDIT):\n",
        new="        if conn.closed:\n",
        tests="test_audit.py::test_sealers_at_once_make_one_chain",
    ),
    Bug(
        name="a chain that is cut off is whole",
        file="flow/audit.py",
        old="_is_cut_off(end, last_id, await _head(conn), noted)",
        new="_is_cut_off(end, last_id, end, noted)",
        tests="test_audit.py",
    ),
    Bug(
        name="a seal is of its row alone",
        file="flow/audit.py",
        old="hashlib.sha256(self.sha256 + canonical(",
        new="hashlib.sha256(canonical(",
        tests="test_audit.py",
    ),
    Bug(
        name="a token is made although nobody could record it",
        file="flow/tokens.py",
        old="    secret = _PREFIX + new_token()\n    async with conn.transaction():\n",
        new="    secret = _PREFIX + new_token()\n    if True:\n",
        tests="test_audit.py",
    ),
    Bug(
        name="a flow's call goes wherever its input says",
        file="flow/outside.py",
        old="if not is_public(address):",
        new="if not address:",
        tests="test_outside.py",
    ),
    Bug(
        name="a message that came too soon after others is given up",
        file="bot/slack_api.py",
        old='RATE_LIMITS = {"ratelimited", "rate_limited", "message_limit_exceeded"}',
        new='RATE_LIMITS = {"ratelimited", "rate_limited"}',
        tests="test_slack_cases.py",
    ),
    Bug(
        name="only one message waits when Slack says with 200 that there are too many",
        file="bot/deliver.py",
        old="if status == 429 or error in RATE_LIMITS:",
        new="if status == 429:",
        tests="test_slack_cases.py",
    ),
    Bug(
        name="the end of a chain is believed",
        file="flow/audit.py",
        old="ORDER BY position DESC OFFSET %s LIMIT 1",
        new="ORDER BY position DESC OFFSET %s * 0 LIMIT 1",
        tests="test_audit.py::test_the_end_of_a_chain_can_be_verified_by_itself",
    ),
    Bug(
        name="anybody asks for another amount",
        file="flow/changes.py",
        old="standing = await check_decidable(conn, approval, person, request_hash=request_hash)",
        new="standing = Standing(listed_as=None)",
        tests="test_every_door.py",
    ),
    Bug(
        name="secrets are logged",
        file="flow/log.py",
        old="        return {name: hide(value) if isinstance(value, str) else value for name, value in line.items()}",
        new="        return line",
        tests="test_logs.py",
    ),
    Bug(
        name="strangers read the metrics",
        file="bot/metrics.py",
        old='if kind.lower() != "bearer" or not hmac',
        new='if kind.lower() != "bearer" and not hmac',
        tests="test_metrics.py::test_metrics_are_for_whoever_has_the_token",
    ),
    Bug(
        name="what is tried again has only begun to wait",
        file="flow/figures.py",
        old="coalesce(waits_since, due_at) AS since",
        new="due_at AS since",
        tests="test_metrics.py::test_what_slack_refuses_and_what_waits_for_it_is_told",
    ),
    Bug(
        name="a drive's spans are not written when it fails",
        file="flow/drive.py",
        old='spans=recorder.rows(error=exc, outcome="failed")',
        new="spans=threads.NONE",
        tests="test_spans.py",
    ),
    Bug(
        name="what is done in a node is recorded beside it",
        file="flow/nodes.py",
        old="        recorder.around = self.here\n",
        new="",
        tests="test_spans.py",
    ),
    Bug(
        name="a span says what was raised",
        file="flow/spans.py",
        old="self.error = type(error).__name__ if isinstance(error, BaseException) else error",
        new='self.error = f"{type(error).__name__}: {error}"',
        tests="test_spans.py",
    ),
    Bug(
        name="a trace is that of whoever sends any header",
        file="flow/spans.py",
        old="(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}",
        new="[0-9a-f]{32}-[0-9a-f]{16}",
        tests="test_spans.py",
    ),
    Bug(
        name="waits side by side are added up",
        file="flow/trace.py",
        old="max(timedelta(0), ended - max(span.started_at, until))",
        new="ended - span.started_at",
        tests="test_spans.py",
    ),
    Bug(
        name="what is asked for by its id may be of any workspace",
        file="flow/approvals.py",
        old="    if not reaches(person, approval.workspace):",
        new="    if not approval.interrupt_id:",
        tests="test_workspaces_apart.py",
    ),
    Bug(
        name="a name on the list is enough in any workspace",
        file="flow/standing.py",
        old="    if not reaches(person, approval.workspace):",
        new="    if not approval.interrupt_id:",
        tests="test_workspaces_apart.py::test_a_name_on_the_list_says_nothing_in_another_workspace",
    ),
    Bug(
        name="a bot of one token posts what is of a workspace",
        file="bot/outlet.py",
        old="        if thread.workspace == self.workspace:",
        new="        if thread.thread_id:",
        tests="test_workspaces_met.py::test_a_bot_of_one_token_posts_nothing_of_a_workspace",
    ),
    Bug(
        name="a member of a grid is somebody else in each of its teams",
        file="bot/groups.py",
        old="names=person.names | ours.names | everywhere)",
        new="names=person.names | ours.names)",
        tests="test_workspaces_met.py::test_a_member_of_a_grid_is_one_person_in_all_of_its_teams",
    ),
    Bug(
        name="a list has what is of other workspaces",
        file="flow/inbox.py",
        old='newest(("requested_at", "interrupt_id"), before, reached(person))',
        new='newest(("requested_at", "interrupt_id"), before)',
        tests="test_workspaces_apart.py",
    ),
    Bug(
        name="a program is told what happens in other workspaces",
        file="flow/events.py",
        old='of_workspace = "" if workspace is None else " AND workspace = %(workspace)s"',
        new='of_workspace = ""',
        tests="test_events.py",
    ),
    Bug(
        name="events of one workspace are gone past",
        file="flow/events.py",
        old="    return found, read if len(found) == limit else max(read, last)",
        new="    return found, max(read, last)",
        tests="test_events.py",
    ),
    Bug(
        name="whoever was signed in stays when the app is uninstalled",
        file="flow/sessions.py",
        old=" AND w.token IS NOT NULL))",
        new="))",
        tests="test_workspaces_apart.py",
    ),
    Bug(
        name="whoever is away in one workspace is away in all",
        file="flow/standing.py",
        old="    if absent.workspace != approval.workspace:",
        new="    if not absent.key:",
        tests="test_workspaces_apart.py",
    ),
    Bug(
        name="a token of one workspace starts things in another",
        file="bot/api.py",
        old="    if token.workspace is not None and asked.workspace not in (None, token.workspace):",
        new="    if token.workspace is not None and asked.workspace == token.workspace:",
        tests="test_workspaces_apart.py",
    ),
    Bug(
        name="an installation comes back with any state",
        file="bot/install.py",
        old='request.query.get("state", "").encode("utf-8", "surrogatepass")):',
        new="state.encode()):",
        tests="test_install.py::test_coming_back_to_another_browser_or_too_late_installs_nothing",
    ),
    Bug(
        name="a state is good for many installations",
        file="flow/workspaces.py",
        old="        return spent.rowcount == 1",
        new="        return spent.rowcount < 2",
        tests="test_install.py::test_a_state_is_good_for_one_installation",
    ),
    Bug(
        name="a workspace's token is kept in clear",
        file="flow/cipher.py",
        old='return self._fernet.encrypt(f"{workspace} {token}".encode()).decode()',
        new='return f"{workspace} {token}"',
        tests="test_install.py::test_no_token_is_in_the_database_in_clear",
    ),
    Bug(
        name="a token opens in whichever row it stands",
        file="flow/cipher.py",
        old="        if of != workspace:",
        new="        if not of:",
        tests="test_workspaces.py::test_a_token_that_is_copied_into_another_row_opens_nowhere",
    ),
    Bug(
        name="an uninstall is ignored",
        file="bot/bots.py",
        old="                    await self._end_if_dead(row)",
        new="                    await self._row(row.workspace)",
        tests="test_many_workspaces.py::test_a_workspace_that_uninstalls_the_app_loses_its_token",
    ),
    Bug(
        name="an uninstall that is late ends a new installation",
        file="bot/bots.py",
        old='installed again", row.workspace)\n            return\n',
        new='installed again", row.workspace)\n',
        tests="test_many_workspaces.py::test_an_uninstall_that_is_heard_after_a_new_installation_kills_nothing",
    ),
    Bug(
        name="a bot goes on with a workspace as it was",
        file="bot/workspaces.py",
        old="        if known is None or known[0] != row:",
        new="        if known is None:",
        tests="test_many_workspaces.py",
    ),
    Bug(
        name="one workspace's quiet is that of all",
        file="bot/deliver.py",
        old="            self._quiet_until[outlet.workspace] =",
        new="            self._quiet_until[None] =",
        tests="test_many_workspaces.py::test_a_workspace_that_slack_wants_to_be_quiet_holds_up_no_other",
    ),
    Bug(
        name="small claims are paid where the policy is gone",
        file="flow/policy.py",
        old="NOBODY = OneTier(approvers=(), limits={})",
        new="NOBODY = OneTier(approvers=(), limits=LIMITS)",
        tests="test_workspaces.py::test_nothing_is_paid_unasked_where_the_policy_is_gone_or_broken",
    ),
]

_COPIED = (
    "bot",
    "docs",
    "flow",
    "tests",
    "claim_flow.py",
    "manifest.yml",
    "policy.example.toml",
    "pyproject.toml",
    "README.md",
    ".env.example",
)


@pytest.mark.planted
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_the_suite_goes_red(bug: Bug, tmp_path: Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, tmp_path / name)
    plant(bug, tmp_path)
    wanted = [str(Path("tests") / name) for name in bug.tests.split()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *wanted],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1: tests ran, and some failed.
    assert done.returncode == 1, f"not caught:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert re.search(r"\d+ failed", done.stdout), done.stdout[-3000:]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_bug_can_still_be_planted(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text().count(bug.old) == 1
    assert all((ROOT / "tests" / name.partition("::")[0]).exists() for name in bug.tests.split())


def plant(bug: Bug, folder: Path) -> None:
    file = folder / bug.file
    file.write_text(file.read_text().replace(bug.old, bug.new))
