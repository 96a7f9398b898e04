"""One workspace, as notices reach it: posts cards, keeps every copy of them true, says the outcome below; and alarms.

Slack has no idempotency key: after a result that leaves it open whether Slack acted, the channel's history is searched
for the interrupt id in the message's metadata before the one re-send. An update is always rendered from the rows, never
from what was posted, so doing it twice is harmless. Of several copies each is noted as soon as Slack has answered: what
is tried again goes on where it was stopped, or eighty copies would never all come true at fifty calls a minute.
Whatever Slack refuses rises: what becomes of a notice is `bot.deliver`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot import blocks
from bot.places import Places, Refusals, concerns, is_direct, is_served
from bot.slack_api import fix_of, is_refusal, read_error
from flow import notices
from flow.advice import advice_of
from flow.approvals import approval_of
from flow.database import Connection
from flow.delegations import standing_in_for
from flow.errors import WorkspaceClosed
from flow.model import Approval, Notice, Payment, Thread
from flow.payments import payments_of
from flow.threads import thread_of
from flow.workspaces import Workspace

log = logging.getLogger(__name__)

# Slack allows one message a second in a channel: https://api.slack.com/apis/rate-limits
_BETWEEN_POSTS_S = 1.0
# Slack's clock gives a message its ts, the database's says when it was asked for: they need not agree.
_CLOCKS_APART_S = 300.0
# An attempt to post an alarm that is older than this is not looked for: the channel may be a busy one.
_LONGEST_DOUBT = timedelta(days=1)
_EVENTS = {
    "card": "approval_requested",
    "reply": "approval_outcome",
    "reminder": "approval_reminder",
    "alarm": "thread_alarm",
}


class LeaseLost(Exception):
    """Somebody else may be delivering this notice."""


class Outlet:
    """A client, and the channels that it posts to. `row` is the workspace, of several, that these are of."""

    def __init__(
        self,
        client: AsyncWebClient,
        channel: str,
        *,
        ops_channel: str | None = None,
        public_url: str | None = None,
        row: Workspace | None = None,
    ) -> None:
        self._client, self.channel, self._ops_channel = client, channel, ops_channel or channel
        self._public_url, self.row = public_url, row
        self._places = Places(client, channel)
        self._last_post: dict[str, float] = {}

    async def of(self, _conn: Connection, _notice: Notice) -> Outlet:
        """The outlet of a notice: where there is one, this."""
        return self

    @property
    def workspace(self) -> str | None:
        """The id of the workspace."""
        return self.row.workspace if self.row is not None else None

    @property
    def rests_until(self) -> float:
        """The loop's time at which each of its channels takes a message again."""
        return max(self._last_post.values(), default=0.0) + _BETWEEN_POSTS_S

    async def tell(self, conn: Connection, notice: Notice) -> bool:
        """Tell the outside. False if it is too early for that."""
        if notice.kind == "card":
            await self._show(conn, notice)
        elif notice.kind == "alarm":
            await self._alarm(conn, notice)
        else:
            return await self._say(conn, notice)
        return True

    async def _show(self, conn: Connection, notice: Notice) -> None:
        """Make every copy of the card show what the rows say now; post those that are missing while it is pending.

        A place that Slack refuses does not keep the others from it; the refusal rises at the end.
        """
        approval, thread, payment = await self._our_facts(conn, notice)
        approval = await self._places.shown(approval)
        advice = (await advice_of(conn, [thread.thread_id])).get(thread.thread_id)
        text, shown = blocks.card(approval, thread, payment, advice, public_url=self._public_url)
        copies, refusals = await notices.copies_of(conn, approval.interrupt_id), Refusals()
        copies = await self._update(conn, notice, copies, refusals, text=text, blocks=shown)
        # Nobody is shown anew what is settled, nor where somebody has put in a place past us; what was perhaps shown is
        # looked for.
        if approval.is_open or notice.ambiguous:
            fill = partial(self._fill, conn, notice, approval, text=text, blocks=shown)
            for place in await self._places.of(approval):
                with refusals.of(place or self.channel):
                    copies += await fill(place, copies)
            # Last: nobody else waits for what Slack says of whoever decides for somebody who is away.
            delegates, unsaid = await self._delegates_of(conn, approval)
            for place in delegates:
                with refusals.of(place):
                    copies += await fill(place, copies)
            if not copies and approval.post_to == "direct":
                # Nobody can be reached by a direct message.
                place = approval.channel or notices.OWN_CHANNEL
                with refusals.of(place or self.channel):
                    await fill(place, copies)
            if unsaid is not None:
                raise unsaid
        refusals.raise_first()

    async def _delegates_of(self, conn: Connection, approval: Approval) -> tuple[list[str], Exception | None]:
        """Where the copies belong of those who decide for somebody who is away, or why that cannot be said."""
        if approval.post_to == "channel" or not (stood_in := await standing_in_for(conn, approval)):
            return [], None
        try:
            return await self._places.of_delegates(approval, stood_in), None
        except Exception as exc:  # noqa: BLE001 (it rises once all the others have theirs)
            return [], exc

    async def _fill(
        self,
        conn: Connection,
        notice: Notice,
        approval: Approval,
        place: str,
        copies: Sequence[notices.Copy],
        **message: Any,
    ) -> list[notices.Copy]:
        """The copies at a place that seems to have none: those that an earlier attempt posted without hearing of it,
        now true; else a new one, if the request is open."""
        if not self._places.is_open(place):
            await _hold(conn, notice)
        try:
            channel = await self._places.opened(place)
        except SlackApiError as exc:
            if approval.is_open or not is_refusal(exc):
                raise
            # Nothing of ours can be where nothing can be said.
            return []
        if is_served(place, channel, copies):
            return []
        if notice.ambiguous and (found := await self._find(channel, notice, since=approval.requested_at)):
            for at in found:
                await notices.remember_message(conn, approval.interrupt_id, *at, place=place)
                await self._client.chat_update(channel=at[0], ts=at[1], **message)
            return [notices.Copy(channel=at[0], ts=at[1], place=place) for at in found]
        if not approval.is_open:
            return []
        at = await self._post(conn, notice, channel, **message)
        await notices.remember_message(conn, approval.interrupt_id, *at, place=place, showing=notice)
        return [notices.Copy(channel=at[0], ts=at[1], place=place)]

    async def _update(
        self, conn: Connection, notice: Notice, copies: Sequence[notices.Copy], refusals: Refusals, **message: Any
    ) -> list[notices.Copy]:
        """Update every copy that is not known to show this version, and return those that are still there: one that was
        deleted is forgotten."""
        left = [copy for copy in copies if copy.has(notice)]
        for number, copy in enumerate(copy for copy in copies if not copy.has(notice)):
            if number:
                await _hold(conn, notice)
            with refusals.of(copy.channel):
                try:
                    await self._client.chat_update(channel=copy.channel, ts=copy.ts, **message)
                except SlackApiError as exc:
                    if read_error(exc)[1] != "message_not_found":
                        # It stands there, although it cannot be changed.
                        left.append(copy)
                        raise
                    await notices.forget_message(conn, copy.channel, copy.ts)
                else:
                    left.append(copy)
                    if len(copies) > 1:
                        await notices.note(conn, notice, copy)
        return left

    async def _say(self, conn: Connection, notice: Notice) -> bool:
        """Say the outcome below each copy of the card, and to whoever asked if they can read it nowhere; or a reminder
        below those that concern somebody whose vote is missing. False if the card is still to be posted."""
        approval, thread, payment = await self._our_facts(conn, notice)
        approval = await self._places.shown(approval)
        if notice.kind == "reminder" and not approval.is_open:
            return True
        copies, refusals = await notices.copies_of(conn, approval.interrupt_id), Refusals()
        if not copies and await notices.card_status(conn, approval.interrupt_id) in ("pending", "sending"):
            return False
        if notice.kind == "reminder":
            doubt = notice.ambiguous
            missing, group_ids = await self._places.missing(approval, await standing_in_for(conn, approval))
            text = blocks.reminder(approval, missing, group_ids)
            below = [copy for copy in copies if concerns(copy, missing)]
        else:
            # An earlier attempt may have reached a copy, and failed at the next.
            doubt, text, below = notice.attempt > 1, blocks.reply(approval, thread, payment), copies
        for copy in (copy for copy in below if not copy.has(notice)):
            with refusals.of(copy.channel):
                if not (doubt and await self._has_reply(copy.channel, copy.ts, notice)):
                    await self._post(conn, notice, copy.channel, thread_ts=copy.ts, text=text)
                if len(below) > 1:
                    await notices.note(conn, notice, copy)
        if notice.kind == "reply":
            await self._tell_requester(conn, notice, approval, copies, blocks.told_outcome(approval, thread, payment))
        refusals.raise_first()
        return True

    async def _tell_requester(
        self, conn: Connection, notice: Notice, approval: Approval, copies: Sequence[notices.Copy], text: str
    ) -> None:
        """Tell the outcome to whoever asked, where all copies are in conversations, and none of those is theirs."""
        requester = await self._places.requester_of(approval)
        if approval.post_to != "direct" or requester is None or not all(is_direct(copy.channel) for copy in copies):
            return
        await _hold(conn, notice)
        try:
            channel = await self._places.opened(requester)
            if any(copy.channel == channel for copy in copies):
                return
            if notice.attempt > 1 and await self._find(channel, notice, since=approval.requested_at):
                return
            await self._post(conn, notice, channel, text=text)
        except SlackApiError as exc:
            if not is_refusal(exc):
                raise
            # Whoever cannot be sent a message has left, or wants none: nothing that an operator could mend.
            log.warning("thread %s: %s was not told the outcome: %s", notice.thread_id, requester, read_error(exc)[1])

    async def _alarm(self, conn: Connection, notice: Notice) -> None:
        """Tell the operators that the thread needs them, and why."""
        thread = self._ours(await thread_of(conn, notice.thread_id))
        since = max(thread.created_at, datetime.now(UTC) - _LONGEST_DOUBT)
        text = blocks.alarm(thread, await notices.failures_of(conn, notice.thread_id))
        if text is None:
            # It needs nobody any more.
            return
        # Whatever the operators' channel has against it: somebody must hear.
        for channel in (self._ops_channel, self.channel):
            try:
                if not (notice.ambiguous and await self._find(channel, notice, since=since)):
                    await self._post(conn, notice, channel, text=text)
            except SlackApiError as exc:
                if channel == self.channel or not is_refusal(exc):
                    raise
                error, place = read_error(exc)[1], self.workspace or "SLACK_OPS_CHANNEL"
                fix = fix_of(error, self.workspace, channel="SLACK_OPS_CHANNEL")
                log.error("%s takes no alarms (%s): %s", place, error, fix)  # noqa: TRY400 (no bug of ours)
            else:
                return

    async def _our_facts(self, conn: Connection, notice: Notice) -> tuple[Approval, Thread, Payment | None]:
        approval, thread, payment = await _facts(conn, notice)
        return approval, self._ours(thread), payment

    def _ours(self, thread: Thread) -> Thread:
        """The thread, if it is of this workspace. Raises WorkspaceClosed."""
        if thread.workspace == self.workspace:
            return thread
        if thread.workspace is None:
            raise WorkspaceClosed(str(self.workspace), "is not the one where this was asked")
        raise WorkspaceClosed(thread.workspace, "is not where this bot posts: run the deliverer with TOKEN_KEYS")

    async def _post(self, conn: Connection, notice: Notice, channel: str, **message: Any) -> tuple[str, str]:
        """Post, and return the channel (an id, also where a name or a member was given) and the ts.

        Raises LeaseLost if we stood still for so long that somebody else may have posted it.
        """
        loop = asyncio.get_running_loop()
        wait_s = max(0.0, self._last_post.get(channel, 0.0) + _BETWEEN_POSTS_S - loop.time())
        # Taken at once: another lane may post there, too.
        self._last_post[channel] = loop.time() + wait_s
        await asyncio.sleep(wait_s)
        await _hold(conn, notice)
        answer = await self._client.chat_postMessage(
            channel=channel,
            metadata=_metadata(notice),
            unfurl_links=False,
            unfurl_media=False,
            link_names=False,
            **message,
        )
        return str(answer["channel"]), str(answer["ts"])

    async def _find(self, channel: str, notice: Notice, *, since: datetime) -> list[tuple[str, str]]:
        """The messages in the channel that are about this notice."""
        pages = await self._client.conversations_history(
            channel=channel,
            oldest=str(since.timestamp() - _CLOCKS_APART_S),
            include_all_metadata=True,
            limit=200,
        )
        return [
            (channel, str(message["ts"]))
            async for page in pages
            for message in page["messages"]
            if _is_about(message, notice)
        ]

    async def _has_reply(self, channel: str, ts: str, notice: Notice) -> bool:
        pages = await self._client.conversations_replies(channel=channel, ts=ts, include_all_metadata=True, limit=200)
        return any([_is_about(each, notice) async for page in pages for each in page["messages"]])


async def _hold(conn: Connection, notice: Notice) -> None:
    """Begin the lease anew: many places take longer than one lasts. Raises LeaseLost."""
    if not await notices.renew(conn, notice):
        raise LeaseLost


async def _facts(conn: Connection, notice: Notice) -> tuple[Approval, Thread, Payment | None]:
    """Read after the lease was committed, so at least as new as `notice.version`."""
    assert notice.interrupt_id is not None
    approval = await approval_of(conn, notice.interrupt_id)
    thread = await thread_of(conn, notice.thread_id)
    return approval, thread, (await payments_of(conn, [notice.thread_id])).get(notice.thread_id)


def _metadata(notice: Notice) -> dict[str, Any]:
    """Format: https://api.slack.com/metadata/using"""
    # A card is the same one in each version; a later outcome, or alarm, is another message.
    version = 1 if notice.kind == "card" else notice.version
    payload: dict[str, Any] = {"thread_id": notice.thread_id, "version": version}
    if notice.interrupt_id is not None:
        payload["interrupt_id"] = notice.interrupt_id
    return {"event_type": _EVENTS[notice.kind], "event_payload": payload}


def _is_about(message: dict[str, Any], notice: Notice) -> bool:
    """Whether we posted this message for this notice."""
    ours, metadata = _metadata(notice), message.get("metadata") or {}
    return all(metadata.get(name) == value for name, value in ours.items())
