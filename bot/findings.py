"""What `doctor` says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    found: str
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
