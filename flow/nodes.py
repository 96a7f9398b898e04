"""The spans of a flow's nodes, from what LangGraph says of its tasks: any flow has them, and none knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langgraph.config import get_config

from flow.spans import Live, Recorder


class Nodes:
    """The nodes of one run of a graph, and of the graphs within it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # By LangGraph's id of the task: the newest run of each.
        self._runs: dict[str, Live] = {}
        self._open: dict[str, Live] = {}
        self._failed: list[Live] = []
        # Those of which something within was recorded: they did run.
        self._touched: set[str] = set()
        recorder.around = self.here

    def saw(self, within: Sequence[str], event: Mapping[str, Any]) -> None:
        """A task is announced before its step begins, and again with its result when it has ended.

        `within`: the tasks above it, as `node:task`.
        """
        task_id = event["id"]
        if "input" in event:
            live = self._recorder.begin(event["name"], parent_id=self._above(within))
            self._runs[task_id] = self._open[task_id] = live
        elif task_id in self._open:
            live = self._open.pop(task_id)
            live.note(paused=True if event["interrupts"] else None)
            self._recorder.end(live)
            if event["error"]:
                self._failed.append(live)

    def here(self) -> str:
        """The id of the span of the node that calls this, else of the drive."""
        try:
            place = get_config()["metadata"]["langgraph_checkpoint_ns"]
        except (RuntimeError, KeyError):
            return self._recorder.top.span_id
        segments = place.split("|")
        self._touched.update(segment.rpartition(":")[2] for segment in segments)
        return self._above(segments)

    def end(self, error: BaseException | None = None) -> None:
        """The run is over. What was announced and has not ended did not run: its result was there already; or it was
        cut off by this error of another one."""
        for live in self._failed:
            # LangGraph gives the text alone, and that may quote anything.
            live.error = type(error).__name__ if error else "Exception"
        for task_id, live in self._open.items():
            if error is not None and task_id in self._touched:
                self._recorder.end(live, error="CancelledError")
        self._failed.clear()
        self._open.clear()

    def _above(self, segments: Sequence[str]) -> str:
        """The span of the innermost of these tasks."""
        for segment in reversed(segments):
            if (live := self._runs.get(segment.rpartition(":")[2])) is not None:
                return live.span_id
        return self._recorder.top.span_id
