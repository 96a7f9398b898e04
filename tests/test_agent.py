"""A user's own agents, with LangChain's human in the loop: asked in Slack, and their tools run as people answered.

The package is written to a folder and named by FLOWS; bot, worker and the local Slack are processes of their own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio

from flow.database import Connection, connect
from tests.block_kit import buttons_of, words_of
from tests.command import ROOT, Terminal, worker
from tests.conftest import _database, _url_of
from tests.local_slack import CHANNEL, LocalSlack, free_port, skip_reason
from tests.rows import all_rows, one_row, until, value
from tests.slack_door import content_of, reject_in
from tests.test_change_modal import filled
from tests.test_slack_clicks import serve

pytestmark = [
    pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or ""),
    pytest.mark.asyncio(loop_scope="module"),
]

# The model calls the tool with whatever the task says, then repeats what came of it.
_PACKAGE = '''
import json
import os
from typing import Any, TypedDict

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel

from flow.flows import Flow


class Scripted(BaseChatModel):
    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **_):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **_):
        task = next(m for m in messages if isinstance(m, HumanMessage))
        after = messages[messages.index(task) + 1:]
        if not after:
            calls = [
                {"name": "send_email", "args": args, "id": f"call-{number}", "type": "tool_call"}
                for number, args in enumerate(json.loads(task.content))
            ]
            message = AIMessage(content="", tool_calls=calls)
        else:
            message = AIMessage(content=json.dumps([m.content for m in after if m.type == "tool"]))
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
def send_email(to: str, text: str) -> str:
    """Send a mail."""
    with open(os.environ["OUTBOX"], "a") as outbox:
        outbox.write(json.dumps({"to": to, "text": text}) + "\\n")
    return f"sent to {to}"


class Task(BaseModel):
    messages: list[dict[str, Any]]


def agent(mode):
    human = HumanInTheLoopMiddleware(interrupt_on={"send_email": True}, interrupt_mode=mode)
    return create_agent(Scripted(), [send_email], middleware=[human])


def last(state):
    return state["messages"][-1].content


class Draft(BaseModel):
    to: str


class State(TypedDict, total=False):
    to: str
    result: dict[str, Any]


def review(state):
    [answer] = interrupt([{
        "action_request": {"action": "send_email", "args": {"to": state["to"]}},
        "config": {"allow_accept": True, "allow_edit": True, "allow_respond": True, "allow_ignore": True},
        "description": "A mail to a customer",
    }])
    return {"result": answer}


def inbox():
    graph = StateGraph(State)
    graph.add_node("review", review)
    graph.add_edge(START, "review")
    graph.add_edge("review", END)
    return graph


FLOWS = [
    Flow(name="agent", version="1", build=lambda: agent("batched"), input=Task, result=last),
    Flow(name="agent-per-call", version="1", build=lambda: agent("per_call"), input=Task, result=last),
    Flow(name="inbox", version="1", build=inbox, input=Draft),
]
'''

_BOB = {"to": "bob@example.com", "text": "Hello"}
_CAROL = {"to": "carol@example.com", "text": "Hello, Carol"}


class Agency:
    """The services, the workspace, and the person who watches both and the database."""

    def __init__(self, slack: LocalSlack, terminal: Terminal, url: str) -> None:
        self.slack, self.terminal, self.url = slack, terminal, url
        self.conn: Connection

    async def start(self, thread_id: str, flow: str, given: Any) -> None:
        done = await self.terminal.run_meanwhile(
            "start", "--thread", thread_id, "--flow", flow, "--input", json.dumps(given)
        )
        assert done.code == 0, done.err

    async def task(self, thread_id: str, *mails: Any, flow: str = "agent") -> None:
        """An agent that will send these mails."""
        await self.start(thread_id, flow, {"messages": [{"role": "user", "content": json.dumps(mails)}]})

    async def cards(self, thread_id: str, count: int = 1) -> list[str]:
        """The ts of each of the thread's cards, once there are so many, in the order of what they ask about."""

        async def posted() -> list[str]:
            rows = await all_rows(
                self.conn,
                "SELECT ts FROM messages JOIN approvals USING (interrupt_id) WHERE thread_id = %s"
                " ORDER BY request->'actions'->0->'args'->>'to'",
                thread_id,
            )
            return [row["ts"] for row in rows] if len(rows) == count else []

        return await until(posted, within_s=60)

    async def shown(self, ts: str) -> dict[str, Any]:
        [message] = [each for each in await self.slack.messages(CHANNEL) if each["ts"] == ts]
        return message

    async def press(self, ts: str, action_id: str) -> None:
        await self.slack.click("U01ALICE", CHANNEL, ts, action_id)
        assert (await self.slack.answers("interactive"))[-1].status == 200

    async def change(self, ts: str, values: dict[str, Any]) -> dict[str, str]:
        """Press Change, fill in the form and send it; the errors that it shows."""
        await self.press(ts, "change")
        await content_of(self.slack.modals)
        return await self.slack.submit_modal("U01ALICE", values)

    async def result(self, thread_id: str) -> Any:
        async def done() -> bool:
            return bool(await value(self.conn, "SELECT status FROM threads WHERE thread_id = %s", thread_id) == "done")

        await until(done, within_s=60)
        return await value(self.conn, "SELECT result FROM threads WHERE thread_id = %s", thread_id)

    async def reply(self, ts: str) -> str:
        async def replies() -> list[str]:
            said = await self.slack.messages(CHANNEL)
            return [each["text"] for each in said if each.get("thread_ts") == ts and each["ts"] != ts]

        [reply] = await until(replies)
        return reply

    def sent(self) -> list[dict[str, Any]]:
        """Each call of the tool, as it was made."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self._outbox.read_text().splitlines()]
        return []

    def forget(self) -> None:
        self._outbox.unlink(missing_ok=True)

    @property
    def _outbox(self) -> Path:
        return self.terminal.folder / "outbox"


@pytest.fixture(scope="module")
def module_database(admin: psycopg.Connection, template: str) -> Iterator[str]:
    with _database(admin, template) as name:
        yield name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _at_work(
    server_url: str, module_database: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Agency]:
    url, port, folder = _url_of(server_url, module_database), free_port(), tmp_path_factory.mktemp("agency")
    (folder / "bureau").mkdir()
    (folder / "bureau" / "__init__.py").write_text(_PACKAGE)
    with LocalSlack(request_url=f"http://127.0.0.1:{port}/slack/events") as slack:
        terminal = Terminal(
            folder,
            DATABASE_URL=url,
            PORT=str(port),
            APPROVERS="U01ALICE,U02BOB",
            FLOWS="flow.claims,bureau",
            OUTBOX=str(folder / "outbox"),
            PYTHONPATH=f"{ROOT}:{folder}",
            **slack.environment(),
        )
        async with (
            await connect(url, "drive") as conn,
            serve(terminal, "bot"),
            worker(Terminal(folder, **_without_slack(terminal)), conn),
        ):
            yield Agency(slack, terminal, url)


def _without_slack(terminal: Terminal) -> dict[str, str]:
    """What there is to tell Slack is left to the bot."""
    return {name: each for name, each in terminal.environment.items() if not name.startswith("SLACK_")}


@pytest_asyncio.fixture(loop_scope="module")
async def agency(_at_work: Agency) -> AsyncIterator[Agency]:
    """The agency, with a connection and an outbox that only this test uses."""
    async with await connect(_at_work.url, "drive") as conn:
        _at_work.conn = conn
        _at_work.forget()
        yield _at_work


async def test_an_approved_call_runs_once_with_the_arguments_that_were_shown(agency: Agency) -> None:
    await agency.task("a1", _BOB)
    [ts] = await agency.cards("a1")
    card = await agency.shown(ts)
    assert buttons_of(card) == ["approve", "reject", "change", "details"]
    assert 'send_email\n{\n  "to": "bob@example.com",\n  "text": "Hello"\n}' in words_of(card)
    assert "Tool execution requires approval" in words_of(card)
    assert agency.sent() == []

    await agency.press(ts, "approve")
    assert json.loads(await agency.result("a1")) == ["sent to bob@example.com"]
    assert agency.sent() == [_BOB]
    assert (await agency.reply(ts)).startswith("✅ Approved by alice. Done: ")


async def test_an_edited_call_runs_once_with_the_edited_arguments(agency: Agency) -> None:
    await agency.task("a2", _BOB)
    [ts] = await agency.cards("a2")
    assert list(await agency.change(ts, filled("edit", "{"))) == ["args-0"]
    assert await agency.slack.submit_modal("U01ALICE", filled("edit", json.dumps(_CAROL))) == {}

    assert "sent to carol@example.com" in await agency.result("a2")
    assert agency.sent() == [_CAROL]
    assert 'edited: {"to": "carol@example.com", "text": "Hello, Carol"}' in await agency.reply(ts)


async def test_a_rejected_call_never_runs_and_the_agent_is_told_why(agency: Agency) -> None:
    await agency.task("a3", _BOB)
    [ts] = await agency.cards("a3")
    assert await agency.change(ts, filled("reject", None, "not this year")) == {}

    assert "with reason: not this year" in await agency.result("a3")
    assert agency.sent() == []
    assert (await agency.reply(ts)).startswith("❌ Rejected by alice, reason: not this year. Done: ")


async def test_two_calls_are_asked_about_on_one_card_and_answered_one_by_one(agency: Agency) -> None:
    await agency.task("a4", _BOB, _CAROL)
    [ts] = await agency.cards("a4")
    answers = filled("respond", None, "Bob is away") | filled("approve", number=1)
    assert await agency.change(ts, answers) == {}

    assert json.loads(await agency.result("a4")) == ["Bob is away", "sent to carol@example.com"]
    assert agency.sent() == [_CAROL]


async def test_in_per_call_mode_each_call_has_a_card_and_an_answer_of_its_own(agency: Agency) -> None:
    dave = {"to": "dave@example.com", "text": "Hello"}
    await agency.task("a5", _BOB, _CAROL, dave, flow="agent-per-call")
    bob, carol, to_dave = await agency.cards("a5", 3)
    assert await reject_in(agency.slack, "U01ALICE", bob) == ""
    assert await agency.change(carol, filled("edit", json.dumps({**_CAROL, "text": "Bye"}))) == {}
    await agency.press(to_dave, "approve")

    assert "sent to carol@example.com" in await agency.result("a5")
    assert sorted(agency.sent(), key=str) == [{**_CAROL, "text": "Bye"}, dave]


@pytest.mark.parametrize(
    ("name", "said", "answer"),
    [
        ("accept", filled("approve"), {"type": "accept", "args": None}),
        (
            "edit",
            filled("edit", '{"to": "c"}'),
            {"type": "edit", "args": {"action": "send_email", "args": {"to": "c"}}},
        ),
        ("respond", filled("respond", None, "Ask Carol"), {"type": "response", "args": "Ask Carol"}),
        ("ignore", filled("reject"), {"type": "ignore", "args": None}),
    ],
)
async def test_a_flow_for_the_agent_inbox_gets_the_answer_that_it_expects(
    agency: Agency, name: str, said: dict[str, Any], answer: dict[str, Any]
) -> None:
    await agency.start(f"inbox-{name}", "inbox", {"to": "bob"})
    [ts] = await agency.cards(f"inbox-{name}")
    assert await agency.change(ts, said) == {}
    assert await agency.result(f"inbox-{name}") == answer
    decided = await one_row(
        agency.conn,
        "SELECT door, person FROM decisions JOIN approvals USING (interrupt_id) WHERE thread_id = %s",
        f"inbox-{name}",
    )
    assert decided == {"door": "slack", "person": "slack:T01TEST/U01ALICE"}
