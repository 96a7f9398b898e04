"""What this process has done since it began, in numbers.

Counted where it has become true: after the commit. A count is of this process, and gone with it, so it stands here as
the process's own, and whoever collects adds up what the processes say. What the database knows is in `flow.figures`.
Knows nothing of who collects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate


class Count:
    """Something that happened, how often, by labels."""

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name, self.help, self.labels = name, help, labels
        self._of: Counter[tuple[str, ...]] = Counter()
        if not labels:
            # One that is there from the start: a first time is a change.
            self._of[()] = 0

    def add(self, *values: str) -> None:
        assert len(values) == len(self.labels), self.name
        self._of[values] += 1

    @property
    def values(self) -> dict[tuple[str, ...], int]:
        return dict(self._of)


class Times:
    """How long something took, in seconds: how often it took no longer than each of these bounds."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self._within = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._within[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    @property
    def cumulative(self) -> list[int]:
        """How many took no longer than each bound; at the end, how many there were."""
        return list(accumulate(self._within))


decisions = Count(
    "claim_flow_decisions", "Decisions that this process recorded, whatever they settled.", "door", "verdict"
)
expiries = Count("claim_flow_expiries", "Requests whose time was over, as this process found: expired or escalated.")
# Slack waits 3 s; a drive that resumes takes some 20 ms.
click_to_answer = Times(
    "claim_flow_click_to_acknowledgement_seconds",
    "From a press in Slack, as it reached this process, to its answer; what was pressed is committed by then.",
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0),
)
click_to_paid = Times(
    "claim_flow_click_to_paid_seconds",
    "From the decision that settled a claim to its payment, as the rows say, of claims that this process had paid.",
    (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 600.0),
)
drives = Count(
    "claim_flow_drives",
    "Drives that this process had done, by how they ended; failed: a step will be tried again; lost: it died.",
    "outcome",
)
takeovers = Count(
    "claim_flow_takeovers", "Drives of this process of threads whose driver before had died or was cut off."
)
payments = Count(
    "claim_flow_payments",
    "Claims that drives of this process brought to their payment's end, by its status.",
    "status",
)
slack_errors = Count(
    "claim_flow_slack_errors", "Calls of Slack by this process that failed, by its error or ours.", "method", "error"
)
webhook_receipts = Count(
    "claim_flow_webhook_receipts",
    "Signed decisions that this process answered, by sender and HTTP status; 401 has no sender.",
    "endpoint",
    "status",
)

COUNTS = (decisions, expiries, drives, takeovers, payments, slack_errors, webhook_receipts)
TIMES = (click_to_answer, click_to_paid)
