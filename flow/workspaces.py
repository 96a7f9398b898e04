"""Many workspaces of Slack on one installation, each with a bot token, a channel and a policy of its own.

Whatever is started in one is posted, decided and seen there alone. With one token, in the settings, there are none:
every `workspace` is None then, and nothing here is asked for.
"""

from __future__ import annotations

from flow.model import Person


def reaches(person: Person, workspace: str | None) -> bool:
    """Whether somebody may at all see or decide what was started in this workspace.

    Members of Slack reach their own alone, and so does a token of the API that was made for one. Whoever is of none
    (an address, the sender of a webhook, the command line) is named by the lists of any.
    """
    if person.key.startswith("slack:"):
        return person.workspace == workspace
    return person.workspace in (None, workspace)
