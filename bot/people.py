"""People of Slack, the same whether they click a button or sign in to a page."""

from __future__ import annotations

from collections.abc import Collection

from flow.model import Person


def slack_person(
    *, user_id: str, name: str, team_id: str, enterprise_id: str | None, own_team: Collection[str]
) -> Person:
    """The member of a team. The same member id in another team is another person, whom a bare id does not name."""
    keys = {f"slack:{team}/{user_id}" for team in (team_id, enterprise_id) if team}
    # In a shared channel the enterprise is ours and the person may not be: only their own team counts.
    names = keys | ({user_id} if (team_id or enterprise_id) in own_team else set())
    return Person(key=f"slack:{team_id or enterprise_id}/{user_id}", name=name, names=frozenset(names))
