"""Many workspaces of Slack on one installation, each with a bot token, a channel and a policy of its own.

Whatever is started in one is posted, decided and seen there alone. With one token, in the settings, there are none:
every `workspace` is None then, and nothing here is asked for.
"""

from __future__ import annotations

from psycopg import sql

from flow.database import Page
from flow.model import Person


def reaches(person: Person, workspace: str | None) -> bool:
    """Whether somebody may at all see or decide what was started in this workspace.

    Members of Slack reach their own alone, and so does a token of the API that was made for one. Whoever is of none
    (an address, the sender of a webhook, the command line) is named by the lists of any.
    """
    if person.key.startswith("slack:"):
        return person.workspace == workspace
    return person.workspace in (None, workspace)


def reached(person: Person) -> Page:
    """The same in SQL, of rows that have a `workspace`."""
    if person.workspace is not None:
        return of_workspace(person.workspace)
    return Page(where=sql.SQL("workspace IS NULL" if person.key.startswith("slack:") else "true"), values={})


def of_workspace(workspace: str) -> Page:
    """Rows of this one alone."""
    return Page(where=sql.SQL("workspace = %(workspace)s"), values={"workspace": workspace})
