"""What can go wrong, one type per condition that a caller can act on. Every message says what to do next.

`exit_code` is the command line's: 1 refused or failed, 2 usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from flow.text import some_of


class FlowError(Exception):
    """Base of everything that this project raises on purpose."""

    exit_code = 1


class BadInput(FlowError):
    """A value that somebody typed cannot be used; nothing was written."""

    exit_code = 2

    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name, self.value, self.expected = name, value, expected
        super().__init__(f"{name} {_shown(value)} is not usable: {expected}")


class SettingError(FlowError):
    """A setting is missing or wrong."""

    exit_code = 2


class DatabaseUnavailable(FlowError):
    """The database cannot be reached, or does not let us do what we must."""


class LocksUnusable(FlowError):
    """Session advisory locks do not hold through this connection, so two processes could drive one thread."""


class TokenUnreadable(SettingError):
    """None of TOKEN_KEYS opens the token of a workspace."""

    def __init__(self, workspace: str) -> None:
        self.workspace = workspace
        super().__init__(
            f"TOKEN_KEYS: no key opens the token of workspace {workspace}: put the key back that it was encrypted with,"
            " behind the others, then `claim_flow.py workspaces rotate`; if it is lost,"
            f" `claim_flow.py workspaces remove {workspace}`, then have the app installed there again"
        )


class UnknownWorkspace(FlowError):
    """The app was never installed in this workspace."""

    def __init__(self, workspace: str) -> None:
        self.workspace = workspace
        super().__init__(
            f"no workspace {_shown(workspace)}: see `claim_flow.py workspaces list`; the app is installed by PUBLIC_URL"
            "/slack/install"
        )


class WorkspaceClosed(FlowError):
    """Nothing is filed or posted there: the app is not installed any more, or nobody has set the workspace up."""

    def __init__(self, workspace: str, why: str) -> None:
        self.workspace = workspace
        super().__init__(f"workspace {workspace} {why}")


class UnknownThread(FlowError):
    """No thread has this id."""

    def __init__(self, thread_id: str) -> None:
        self.thread_id = thread_id
        super().__init__(f"no thread {thread_id}: see `claim_flow.py list`, or start it with `claim_flow.py start`")


class ThreadExists(FlowError):
    """The thread was started before, with another input."""

    def __init__(self, thread_id: str, was: str) -> None:
        self.thread_id = thread_id
        super().__init__(f"thread {thread_id} was started before with another input ({was}): choose another --thread")


class NothingToDecide(FlowError):
    """The thread waits for no decision."""

    def __init__(self, thread_id: str, why: str) -> None:
        self.thread_id = thread_id
        super().__init__(f"thread {thread_id} waits for no decision: {why}")


class UnknownApproval(FlowError):
    """No approval of this installation has this interrupt id."""

    def __init__(self, interrupt_id: str) -> None:
        self.interrupt_id = interrupt_id
        super().__init__(
            f"no approval has the interrupt id {_shown(interrupt_id)} in this database, so nothing was done: if it was"
            " asked for by another installation, decide it there"
        )


class NotAllowed(FlowError):
    """The policy does not let this person decide this approval."""

    def __init__(self, person: str, why: str) -> None:
        self.person, self.why = person, why
        super().__init__(f"{person} may not decide this: {why}")


class GroupsUnknown(NotAllowed):
    """The person may if they are in one of these Slack user groups, which this door has not asked yet.

    Without groups: if they are a full member of our team.
    """

    def __init__(self, person: str, groups: Sequence[str] = ()) -> None:
        self.groups = tuple(groups)
        super().__init__(person, f"nobody has said whether they are in {some_of(groups) or 'our team'}")


class PageNeeded(FlowError):
    """A click in Slack is not enough to approve this much."""

    def __init__(self, interrupt_id: str) -> None:
        self.interrupt_id = interrupt_id
        super().__init__("this much is approved on its page only, not by a click: open the page from the card")


class Tampered(FlowError):
    """A request's row is not what it was when it was asked; nobody decides it, and the operators are told."""

    def __init__(self, interrupt_id: str) -> None:
        self.interrupt_id = interrupt_id
        super().__init__("this request was changed in the database after it was asked: nobody can decide it")


class AlreadyDecided(FlowError):
    """The approval was settled with another verdict; the first one stands."""

    def __init__(self, interrupt_id: str, status: str, by: str, at: datetime | None) -> None:
        self.interrupt_id, self.status, self.by, self.at = interrupt_id, status, by, at
        when = f" at {at:%Y-%m-%d %H:%M:%S %Z}" if at else ""
        super().__init__(f"already {status} by {by}{when}: the first decision stands")


class ApprovalExpired(FlowError):
    """The approval's time is over."""

    def __init__(self, interrupt_id: str, at: datetime) -> None:
        self.interrupt_id, self.at = interrupt_id, at
        super().__init__(f"this request expired at {at:%Y-%m-%d %H:%M:%S %Z}")


class StaleRequest(FlowError):
    """The person was shown another request than the one that would be decided."""

    def __init__(self, interrupt_id: str) -> None:
        self.interrupt_id = interrupt_id
        super().__init__("the request has changed since it was shown: look at it again, then decide")


class DriveFailed(FlowError):
    """A step of the flow failed; the thread keeps its place and is tried again."""

    def __init__(self, thread_id: str, reason: str) -> None:
        self.thread_id, self.reason = thread_id, reason
        super().__init__(f"thread {thread_id} stopped at a failed step: {reason}")


class KeyReused(FlowError):
    """The same key was used before for something else; nobody outside was asked."""

    def __init__(self, key: str, was: str, now: str) -> None:
        self.key, self.was, self.now = key, was, now
        super().__init__(f"{key} stands for {was} already, not for {now}: nothing was done")


class UnknownFlow(FlowError):
    """No flow of this name is here."""

    exit_code = 2

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name, self.known = name, tuple(known)
        super().__init__(f"no flow {_shown(name)} here, only {', '.join(known)}: name its module in FLOWS")


class NotChecked(FlowError):
    """A flow's input could not be checked, so no thread was started."""

    def __init__(self, flow: str, why: str) -> None:
        self.flow, self.why = flow, why
        super().__init__(f"the input of the flow {_shown(flow)} could not be checked, and nothing was started: {why}")


class Unaskable(FlowError):
    """What a flow asks cannot be put to a person."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the flow asks what nobody can be shown: {why}")


class SecretInRequest(FlowError):
    """A request would show a secret to everybody."""

    def __init__(self, place: str, why: str) -> None:
        self.place, self.why = place, why
        super().__init__(
            f"the flow's request would show a secret to everybody: {place} {why}. Pass a reference to it instead; if it"
            " is none, allow its name with Flow(not_secret=(…,))"
        )


class AskedTwice(FlowError):
    """A node asks a second time: after each answer it runs again from its top."""

    def __init__(self) -> None:
        super().__init__("a node asks a second time: give each question a node of its own")


class AskedInEffect(FlowError):
    """An effect was paused for a person, and would begin anew at the answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name} is @idempotent, and asks a person: ask in a node before it, and pass it the answer")


class NoResult(FlowError):
    """A flow has ended, and left nothing that tells what it came to."""


class NodeGone(FlowError):
    """A thread waits in a node that its flow does not have any more."""

    def __init__(self) -> None:
        super().__init__("the node that it waits in is not in its flow any more: bring it back, then `retry`")


class UnstorableState(FlowError):
    """A node returned what its thread's state cannot hold."""


class NotInADrive(FlowError):
    """An effect can be recorded only where a flow runs."""


class NeedsKey(FlowError):
    """Nothing tells this call of an effect from another one; it was not made."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"{name} is called in a subgraph that runs a second time in one run of its node: give it `key=`, or let the"
            " thread be tried again"
        )


class EffectInProgress(FlowError):
    """An earlier call of the same effect may still be under way; try again later."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"{name} is not called again yet: {why}")


class EffectFailed(FlowError):
    """An effect has failed for good, with an exception that cannot be made again; it is not called again."""

    def __init__(self, name: str, type: str, text: str) -> None:
        self.name, self.type, self.text = name, type, text
        super().__init__(f"{name} has failed for good ({type}: {text})")


class ResultNotKept(FlowError):
    """An effect has taken place, and returned what JSON cannot hold; it is not called again."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"{name} is done, but its result was not kept ({why}): let it return JSON values")


class NothingToResolve(FlowError):
    """The thread's payment is not in doubt."""

    def __init__(self, thread_id: str, why: str) -> None:
        self.thread_id = thread_id
        super().__init__(f"nothing to resolve in thread {thread_id}: {why}")


class InFlight(FlowError):
    """The first request with this key is still being worked on; ask again in a moment."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key} is being worked on: ask again in a moment")


class TokenExists(FlowError):
    """A token of this name was made before."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"there is, or was, a token {name}: choose another name")


class UnknownToken(FlowError):
    """No token has this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no token {name}: see `claim_flow.py tokens list`")


class ChainBroken(FlowError):
    """The audit log's chain does not end where its head says: nothing more is sealed until somebody has looked."""

    def __init__(self) -> None:
        super().__init__("the audit log was changed, and is not sealed any more: see `claim_flow.py audit verify`")


class RowMissing(FlowError):
    """A row of the audit log was sealed, and is gone."""

    def __init__(self, audit_id: int) -> None:
        self.audit_id = audit_id
        super().__init__(f"row {audit_id} of the audit log is missing: see `claim_flow.py audit verify`")


class UnknownEndpoint(FlowError):
    """No endpoint of outgoing webhooks has this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no endpoint {name}: see `claim_flow.py webhooks list`, or add it to WEBHOOK_URLS")


class UnknownEvent(FlowError):
    """No event has this id."""

    def __init__(self, event_id: int) -> None:
        self.event_id = event_id
        super().__init__(f"no event {event_id}: its webhook-id is evt_EVENT_ENDPOINT, and /api/events lists them")


class EventsForgotten(FlowError):
    """Events that somebody has not read yet are not kept any more: going on would skip them in silence."""

    def __init__(self, position: int) -> None:
        self.position = position
        super().__init__(
            f"what followed {position} is older than EVENT_RETENTION and forgotten: begin anew without a cursor,"
            " and look at /api/threads for what was missed"
        )


class EventUnknown(FlowError):
    """Somebody wants to read on from an event that is not here: they have read what a restored database has lost."""

    def __init__(self, position: int) -> None:
        self.position = position
        super().__init__(
            f"no event has come to {position} yet: the database was restored, or the cursor is not ours: begin anew"
            " without a cursor, and look at /api/threads for what is true now"
        )


class LinkGone(FlowError):
    """A link decides nothing any more."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"this link is no good: {why}")


class CodeWrong(FlowError):
    """The code that goes with a link was wrong, missing, or tried too often."""

    def __init__(self, tries_left: int) -> None:
        self.tries_left = tries_left
        again = f"{tries_left} more tries" if tries_left else "ask for a new one"
        super().__init__(f"the code is wrong: {again}")


class NoLink(FlowError):
    """This person has no open link to this approval."""

    def __init__(self, thread_id: str, person: str) -> None:
        self.thread_id, self.person = thread_id, person
        super().__init__(f"{person} has no open link to thread {thread_id}: make one with `claim_flow.py link`")


class NotApproved(FlowError):
    """A payment was about to be made that nobody approved in this form."""


def _shown(value: object) -> str:
    """The value as one short, printable, pure-ASCII word."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
