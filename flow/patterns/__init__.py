"""Flows to start from: what teams build first, each in a short file, and each shown to survive being killed.

uv run claim_flow.py start --flow tiered --thread x --input '{"amount": "60000"}'
"""

from __future__ import annotations

from flow.flows import Flow
from flow.patterns import approval

FLOWS: tuple[Flow, ...] = (approval.FLOW,)
