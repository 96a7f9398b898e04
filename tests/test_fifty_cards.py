"""Fifty claims ask at once while Slack has a bad day: fifty cards, each once, at Slack's pace, and all come true."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bot import outlet
from flow.approvals import decide
from flow.database import Connection
from tests.block_kit import SETTLED, WAITING, buttons_of
from tests.chance import seeded
from tests.delivering import deliverer_at, interrupt_of, running
from tests.fault_proxy import FaultKind, FaultProxy
from tests.local_slack import CHANNEL, LocalSlack, skip_reason
from tests.people import ALICE, YES, ask
from tests.rows import until, value

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

_CARDS = 50
# A quarter of Slack's second, which would make this test last a minute.
_BETWEEN_POSTS_S = 0.25


async def test_fifty_cards_at_once_appear_once_each_at_the_pace_that_slack_allows_and_come_true(
    conn: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", _BETWEEN_POSTS_S)
    chance = seeded()
    asked = [await ask(conn, f"t{number}") for number in range(_CARDS)]

    async def all_are_sent() -> bool:
        return bool(await value(conn, "SELECT count(*) = 0 FROM notices WHERE status <> 'sent'"))

    with LocalSlack(request_url="http://127.0.0.1:9/") as slack:
        async with FaultProxy(slack.ui_url) as proxy, deliverer_at(proxy) as deliverer:
            bad_day(proxy, "chat.postMessage", chance.sample(range(_CARDS), 12))
            async with running(deliverer, database_url):
                await until(all_are_sent, within_s=90)
                posted = await slack.messages(CHANNEL)
                came = [at["time"] / 1000 for at in await slack.log() if at["summary"] == "chat.postMessage"]
                bad_day(proxy, "chat.update", chance.sample(range(_CARDS), 12))
                for interrupt_id in asked:
                    assert (await decide(conn, interrupt_id, ALICE, YES)).recorded
                await until(all_are_sent, within_s=90)
                cards = await slack.messages(CHANNEL)

    assert sorted(map(interrupt_of, posted)) == sorted(asked)
    assert {tuple(buttons_of(card)) for card in posted} == {tuple(WAITING)}
    assert len(came) == len(posted)
    # The calls take their way: a little less than the pace may lie between two of them.
    assert min(later - earlier for earlier, later in pairwise(came)) > 0.8 * _BETWEEN_POSTS_S
    assert [card["ts"] for card in cards] == [card["ts"] for card in posted]
    assert all("Approved by Alice" in card["text"] and buttons_of(card) == SETTLED for card in cards)


def bad_day(proxy: FaultProxy, method: str, unlucky: list[int]) -> None:
    """Of the next calls, these fail: a third is told to wait, a third is not answered, a third never reaches Slack."""
    kinds: tuple[FaultKind, ...] = ("429", "lost_reply", "drop")
    failing = {number: kinds[place % len(kinds)] for place, number in enumerate(unlucky)}
    for number in range(max(unlucky) + 1):
        # One that is slow by no time at all is as good as none.
        proxy.fail(method, failing.get(number, "slow"), delay_s=0)
