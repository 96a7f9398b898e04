"""Flows to start from: what teams build first, each in a short file, and each shown to survive being killed.

uv run claim_flow.py start --flow tiered --thread x --input '{"amount": "60000"}'
"""

from __future__ import annotations

from flow.flows import Flow
from flow.patterns import approval, batch, fan_out, payment, research, three_steps, tiered

FLOWS: tuple[Flow, ...] = (
    approval.FLOW,
    tiered.FLOW,
    payment.FLOW,
    research.FLOW,
    fan_out.FLOW,
    batch.FLOW,
    three_steps.FLOW,
)
