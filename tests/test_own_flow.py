"""A flow of somebody's own, as the documentation writes it, outside of this project: every door takes it as it is."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flow.client import Client
from flow.database import Connection
from flow.errors import BadInput, NotAllowed, UnknownFlow
from flow.settings import Settings
from flow.starting import Checker
from tests.api_door import SECRET, Program
from tests.command import ROOT, Done, Terminal
from tests.rows import all_rows, one_row, until, value
from tests.services import Town

DOCS = (ROOT / "docs" / "flows.md").read_text()
FLOW, CLIENT = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
FLOWS = "flow.claims,flow.patterns,myteam.refunds"
INPUT = '{"order": "A-17", "amount": "250.00"}'


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the package that the documentation writes."""
    folder = tmp_path / "elsewhere"
    (folder / "myteam").mkdir(parents=True)
    (folder / "myteam" / "__init__.py").touch()
    (folder / "myteam" / "refunds.py").write_text(FLOW)
    return folder


@pytest.fixture
def terminal(tmp_path: Path, database_url: str, package: Path) -> Terminal:
    return Terminal(tmp_path, DATABASE_URL=database_url, FLOWS=FLOWS, PYTHONPATH=f"{ROOT}:{package}")


def start(terminal: Terminal, thread_id: str = "r1", given: str = INPUT, *, flow: str = "refunds") -> Done:
    return terminal.run("start", "--flow", flow, "--thread", thread_id, "--input", given, "--json")


def test_it_is_ten_lines_beside_the_imports() -> None:
    code = [line for line in FLOW.splitlines() if line and not line.startswith(("#", "from", "import"))]
    assert len(code) <= 10


async def test_the_command_line_starts_it_and_decides(terminal: Terminal) -> None:
    started = start(terminal)
    assert (started.code, started.json["status"], started.json["flow_version"]) == (0, "waiting", "1")
    again = start(terminal)
    assert (again.code, again.json["approval"]) == (0, started.json["approval"])
    done = terminal.run("resume", "--thread", "r1", "--reject", "--reason", "too late", "--json")
    assert (done.code, done.json["status"]) == (0, "done")
    assert done.json["result"] == {"refunded": False, "reason": "too late"}


@pytest.mark.parametrize(
    ("given", "flow", "said"),
    [
        ('{"order": "A-17"}', "refunds", "refunds: amount"),
        ('{"order": "A-17", "amount": 250}', "refunds", "refunds: amount 250"),
        ('{"order": "A", "order": "B", "amount": "2"}', "refunds", "comes twice"),
        ('{"order": "A", "amount": NaN}', "refunds", "NaN"),
        ('{"order": "A\\u0000", "amount": "2"}', "refunds", "cannot be stored"),
        ('{"order": "A", "amount": 1e999}', "refunds", "cannot be stored"),
        ("[]", "refunds", "must be an object"),
        (INPUT, "refund", "no flow 'refund' here"),
    ],
)
async def test_an_input_that_its_model_does_not_take_starts_nothing(
    terminal: Terminal, conn: Connection, given: str, flow: str, said: str
) -> None:
    refused = start(terminal, given=given, flow=flow)
    assert refused.code == 2
    assert said in refused.err
    assert len(refused.err.splitlines()) == 1
    assert await all_rows(conn, "SELECT 1 FROM threads") == []


async def test_of_two_versions_a_new_thread_gets_the_one_that_is_named_first(terminal: Terminal, package: Path) -> None:
    assert start(terminal).json["flow_version"] == "1"
    (package / "myteam" / "refunds_next.py").write_text(FLOW.replace('version="1"', 'version="2"'))
    terminal.environment["FLOWS"] = "flow.claims,myteam.refunds_next,myteam.refunds"
    assert start(terminal, "r2").json["flow_version"] == "2"
    again = start(terminal)
    assert (again.code, again.json["flow_version"]) == (0, "1")
    assert terminal.run("resume", "--thread", "r1", "--approve", "--json").json["status"] == "done"


async def test_another_input_for_the_same_thread_is_refused(terminal: Terminal) -> None:
    assert start(terminal).code == 0
    other = start(terminal, given='{"order": "B-1", "amount": "250.00"}')
    assert (other.code, "another input" in other.err) == (1, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FLOW = 1\n", "has no FLOW"),
        ("raise OSError('no licence')\n", "cannot be imported: OSError: no licence"),
        (FLOW.replace('"refunds"', '"Re funds"'), "a name has small letters"),
    ],
)
async def test_a_module_that_is_no_flow_is_named_with_the_fix(
    terminal: Terminal, package: Path, text: str, said: str
) -> None:
    (package / "myteam" / "refunds.py").write_text(text)
    refused = start(terminal)
    assert (refused.code, said in refused.err) == (2, True)
    assert len(refused.err.splitlines()) == 1


# Services


@pytest.fixture
async def town(tmp_path: Path, database_url: str, package: Path) -> AsyncIterator[Town]:
    folder = tmp_path / "town"
    folder.mkdir()
    settings = {
        "FLOWS": FLOWS,
        "WEBHOOK_SECRETS": f"acme={SECRET}",
        "WEBHOOK_APPROVERS": "acme=carol",
    }
    async with Town(database_url, Terminal(folder, **settings)) as town:
        town.terminal.environment |= {
            "PYTHONPATH": f"{ROOT}:{package}",
            "APPROVERS": "U01ALICE,webhook:acme:carol,api:robot",
        }
        yield town


async def asked(conn: Connection, thread_id: str) -> str:
    """The interrupt id of the thread's request, once it waits."""

    async def waiting() -> Any:
        rows = await all_rows(
            conn,
            "SELECT interrupt_id FROM approvals JOIN threads USING (thread_id)"
            " WHERE thread_id = %s AND threads.status = 'waiting'",
            thread_id,
        )
        return rows[0]["interrupt_id"] if rows else None

    return str(await until(waiting, within_s=60))


async def result_of(conn: Connection, thread_id: str) -> Any:
    async def done() -> Any:
        row = await one_row(conn, "SELECT status, result FROM threads WHERE thread_id = %s", thread_id)
        return row["result"] if row["status"] == "done" else None

    return await until(done, within_s=60)


async def test_a_click_a_signed_webhook_and_a_token_decide_it(town: Town, conn: Connection) -> None:
    made = town.terminal.run("tokens", "create", "robot", "--scope", "start", "--scope", "read")
    async with town.service("serve"), Program(f"http://127.0.0.1:{town.port}", made.out.strip()) as robot:
        new = {"flow": "refunds", "input": {"order": "A-17", "amount": "250.00"}}
        for thread_id in ("clicked", "signed"):
            answer = await robot.post("/api/threads", new | {"thread": thread_id})
            assert (answer.status, answer.body["flow"], answer.body["input"]) == (201, "refunds", new["input"])
        assert (await robot.post("/api/threads", new | {"thread": "clicked"})).status == 200
        for wrong in ({"order": "A-17"}, {"order": "A-17", "amount": 3}, {}):
            refused = await robot.post("/api/threads", {"flow": "refunds", "thread": "wrong", "input": wrong})
            assert (refused.status, "amount" in refused.body["detail"] or not wrong) == (422, True)
        assert (await robot.post("/api/threads", new | {"flow": "other", "thread": "wrong"})).status == 422
        assert (await robot.post("/api/threads", {"flow": "refunds", "thread": "wrong"})).status == 422
        assert await value(conn, "SELECT count(*) FROM threads") == 2

        click = await town.caller.body_of(conn, await asked(conn, "clicked"))
        assert await town.click(click) == 200
        signed = await robot.decide_signed(
            await asked(conn, "signed"), {"decision": "reject", "approver": "carol", "reason": "no such order"}
        )
        assert signed.status == 200
        assert await result_of(conn, "clicked") == {"refunded": True, "reason": ""}
        assert await result_of(conn, "signed") == {"refunded": False, "reason": "no such order"}
        shown = (await robot.get("/api/threads/signed")).body
        assert (shown["status"], shown["result"]) == ("done", {"refunded": False, "reason": "no such order"})
        ended = [each for each in (await robot.get("/api/events")).body["items"] if each["type"] == "thread.done"]
        assert {each["data"]["thread"]: each["data"]["result"]["refunded"] for each in ended} == {
            "clicked": True,
            "signed": False,
        }


# Python


async def test_the_client_of_the_documentation_does_what_it_says(
    database_url: str, conn: Connection, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in {"DATABASE_URL": database_url, "FLOWS": FLOWS, "APPROVERS": "api:robot"}.items():
        monkeypatch.setenv(name, said)
    monkeypatch.syspath_prepend(str(package))
    body = "\n".join(f"    {line}" for line in CLIENT.splitlines())
    space: dict[str, Any] = {}
    exec(f"async def documented():\n{body}", space)
    await space["documented"]()
    assert await value(conn, "SELECT status FROM threads WHERE thread_id = 'r2'") == "done"


async def test_the_client_is_a_door_like_the_others(
    database_url: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package))
    settings = Settings(database_url=database_url, flows=FLOWS, approvers="api:robot,api:shop")  # type: ignore[arg-type]
    given = {"order": "A-18", "amount": "99.00"}
    async with Client.of(settings) as client:
        with pytest.raises(UnknownFlow):
            await client.start("other", "r1", given, requested_by="api:shop")
        with pytest.raises(BadInput, match="amount"):
            await client.start("refunds", "r1", {"order": "A-18"}, requested_by="api:shop")
        await client.start("refunds", "r1", given, requested_by="api:shop")
        assert (await client.advance("r1")).status == "waiting"
        [approval] = await client.pending("r1")
        for stranger in ("api:shop", "api:other", "alice@example.com"):
            with pytest.raises(NotAllowed):
                await client.decide(approval.interrupt_id, by=stranger, approve=True)
        with pytest.raises(BadInput):
            await client.decide(approval.interrupt_id, by="U01ALICE", approve=True)
        await client.decide(approval.interrupt_id, by="api:robot", approve=False, reason="no")
        assert (await client.advance("r1")).result == {"refunded": False, "reason": "no"}


# Modules that misbehave


async def test_a_thread_that_was_set_aside_goes_on_when_it_is_started_where_its_flow_is(
    terminal: Terminal, conn: Connection
) -> None:
    assert start(terminal).code == 0
    await conn.execute("UPDATE threads SET status = 'unavailable', due_at = NULL, reason = 'nobody has it'")
    again = start(terminal)
    assert (again.code, again.json["status"]) == (0, "waiting")


async def test_a_module_that_starts_a_thread_is_named_and_the_worker_ends(terminal: Terminal, package: Path) -> None:
    module = package / "myteam" / "refunds.py"
    module.write_text(
        f"{FLOW}\nimport threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='telemetry', daemon=True).start()\n"
    )
    done = terminal.run("work", "--once")
    assert (done.code, "a module starts threads when it is imported (telemetry)" in done.err) == (1, True)


async def test_what_a_module_prints_is_no_answer_to_the_web_server(
    database_url: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = package / "myteam" / "refunds.py"
    module.write_text(f"import os\nprint('hello')\nos.write(1, b'hello from C')\n{FLOW}")
    monkeypatch.setenv("FLOWS", FLOWS)
    monkeypatch.syspath_prepend(str(package))
    checker = Checker()
    try:
        new = await checker.filed("refunds", {"order": "A-17", "amount": "2"})
        assert (new.flow, new.flow_version) == ("refunds", "1")
        with pytest.raises(BadInput, match="amount"):
            await checker.filed("refunds", {"order": "A-17"})
    finally:
        await checker.close()
