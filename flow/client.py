"""The service from Python: start threads, decide, and look, as the other doors do.

    async with Client.of() as client:
        await client.start("refunds", "r1", {"order": "A-17", "amount": "250.00"}, requested_by="api:shop")
        thread = await client.advance("r1")
        [approval] = await client.pending("r1")
        await client.decide(approval.interrupt_id, by="api:robot", approve=True)

It works on the database of DATABASE_URL, and so whoever runs it is trusted like the command line to say who decides;
whether the policy names them is checked as at every door.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from flow import approvals, inputs, threads
from flow.advance import advance
from flow.approvals import Decided
from flow.database import Connection, connect, database_url, ensure_schema
from flow.model import Approval, Person, Thread, Verdict
from flow.settings import Settings, read_settings
from flow.starting import filed
from flow.workspaces import workspace_meant


class Client:
    """One connection; use it in one task at a time."""

    def __init__(self, url: str, conn: Connection, settings: Settings) -> None:
        self._url, self._conn, self._settings = url, conn, settings

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, settings: Settings | None = None) -> AsyncIterator[Client]:
        """A client with these settings, by default the environment's. Raises SettingError, DatabaseUnavailable."""
        settings = settings or read_settings()
        url = database_url(settings)
        async with await connect(url, "door") as conn:
            await ensure_schema(url, conn)
            yield cls(url, conn, settings)

    async def start(
        self, flow: str, thread_id: str, given: dict[str, Any], *, requested_by: str, workspace: str | None = None
    ) -> Thread:
        """Start a thread of this flow with this input; it is due at once, and a worker drives it.

        `requested_by` names who asks, who then cannot decide it. The same again returns the thread as it is now.
        `workspace`: in which, where there are many. Raises BadInput, UnknownFlow, ThreadExists, UnknownWorkspace,
        WorkspaceClosed.
        """
        new = filed(self._settings, flow, given)
        where = workspace_meant(workspace, many=self._settings.many_workspaces)
        return await threads.insert_thread(
            self._conn,
            thread_id=inputs.parse_thread_id(thread_id),
            flow=new.flow,
            flow_version=new.flow_version,
            input=new.input,
            requested_by=inputs.parse_text("requested_by", requested_by, inputs.MAX_NAME, lines=False),
            workspace=where,
        )

    async def advance(self, thread_id: str) -> Thread:
        """Wait until the thread waits for a person, is over or cannot go on; without a worker, drive it here."""
        return await advance(self._url, self._conn, thread_id, self._settings)

    async def thread(self, thread_id: str) -> Thread:
        """The thread as it is now; `result` is what its flow has come to. Raises UnknownThread."""
        return await threads.thread_of(self._conn, thread_id)

    async def pending(self, thread_id: str) -> list[Approval]:
        """The approvals that the thread waits for, oldest first."""
        found = await approvals.approvals_of(self._conn, [thread_id])
        return [approval for approval in found[thread_id] if approval.status == "pending"]

    async def decide(
        self, interrupt_id: str, *, by: str, approve: bool, reason: str = "", answer: dict[str, Any] | None = None
    ) -> Decided:
        """Decide in the name of `by`: `api:NAME`, `webhook:ENDPOINT:NAME` or an address. Committed when it returns.

        People of Slack decide in Slack, which vouches for their team.
        `answer` is what there is to say beyond yes or no: see `flow.questions.checked_answer`. Raises NotAllowed,
        AlreadyDecided, ApprovalExpired, UnknownApproval, BadInput.
        """
        verdict = Verdict(
            verdict="approve" if approve else "reject",
            door="python",
            reason=inputs.parse_text("reason", reason, inputs.MAX_NOTE),
            answer=answer,
        )
        return await approvals.decide(self._conn, inputs.parse_interrupt_id(interrupt_id), _person(by), verdict)


def _person(by: str) -> Person:
    if by.startswith(("api:", "webhook:")):
        name = inputs.parse_text("by", by, inputs.MAX_NAME, lines=False)
        return Person(key=name, name=name, names=frozenset({name}))
    return inputs.mail_person(by)
