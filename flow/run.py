"""The graph of one drive: it goes on from its checkpoint until the next pause, and no further than its time allows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Interrupt, StateSnapshot

from flow import effects, threads
from flow.asking import PROGRESS
from flow.errors import NodeGone
from flow.flows import Flow
from flow.model_calls import ModelCalls
from flow.nodes import Nodes
from flow.pen import Pen
from flow.saver import Saver
from flow.spans import recorded_by

# However fast a flow tells how far it is, its row has it this often.
_BETWEEN_PROGRESS_S = 0.25
# LangGraph's own limit is a guard against graphs that never end. Ours is that a drive is counted, and steps go on.
_MOST_STEPS = 1_000_000


class Run:
    """The graph of one drive, with its saver; notices when LangGraph does not move.

    `stopped`: there is more to do, and the time of this drive is over.
    """

    def __init__(self, flow: Flow, pen: Pen, thread_id: str, *, until: float) -> None:
        saver = Saver(pen)
        self.flow, self.stopped, self._saver = flow, False, saver
        self._graph = flow.compile().copy({"checkpointer": saver})
        self._has_inner = any(True for _ in self._graph.get_subgraphs())
        self._pen, self._thread_id, self._until = pen, thread_id, until
        self._config: RunnableConfig = {"configurable": {"thread_id": thread_id}, "recursion_limit": _MOST_STEPS}
        if pen.spans.on:
            self._config["callbacks"] = [ModelCalls(pen.spans)]
        self._place: tuple[object, ...] = ()
        self._has_caught_up = False
        self._progress: list[int] | None = None
        self._progress_at = 0.0

    async def look(self) -> StateSnapshot:
        state: StateSnapshot = await self._graph.aget_state(self._config)
        return state

    async def check_end(self) -> None:
        """Raise NodeGone if it has not ended at all: what LangGraph has no node for, it takes for done."""
        last = await self._saver.aget_tuple(self._config)
        if last is not None and last.pending_writes:
            raise NodeGone

    async def giving(self, state: StateSnapshot, answers: dict[str, Any]) -> Command[Any] | None:
        """What gives the flow these answers, by their interrupt ids, when it is run on.

        None: a step has had its answer, and failed after it. LangGraph has kept it, and would take it, given once more,
        for the answer to the next question of that step, which nobody was asked. Raises NodeGone for a question that
        was asked within an inner graph.
        """
        if self._has_inner:
            state = await self._graph.aget_state(self._config, subgraphs=True)
            if _is_gone(state):
                raise NodeGone
        given = _first_questions(state, self._saver.answered)
        return Command(resume=answers) if given.isdisjoint(answers) else None

    def leaves_behind(self, state: StateSnapshot) -> bool:
        """Whether a branch beside those that ask has failed or was killed: it runs again before the thread waits.

        Once in a drive: of a branch that returned nothing LangGraph does not say that it has ended.
        """
        behind = not self._has_caught_up and any(not task.interrupts and task.result is None for task in state.tasks)
        if behind:
            self._has_caught_up, self._place = True, ()
        return behind

    async def on(self, input: Any) -> StateSnapshot:
        """Run until the next pause, or until this drive's time is over. Raises RuntimeError if that changed nothing:
        LangGraph ignores what it does not know, such as an answer to an interrupt that is gone, and would do so for
        ever."""
        nodes = Nodes(self._pen.spans)
        try:
            with effects.recorded_by(self._pen), recorded_by(self._pen.spans):
                stream: Any = self._graph.astream(
                    input,
                    self._config,
                    context=self._pen,
                    durability="sync",
                    stream_mode=["tasks", "custom"],
                    # The nodes of inner graphs have spans, too.
                    subgraphs=True,
                )
                async with contextlib.aclosing(stream):
                    await self._follow(stream, nodes)
        except BaseException as exc:
            nodes.end(exc)
            raise
        nodes.end()
        await self._keep_progress()
        state = await self.look()
        place = (state.config["configurable"].get("checkpoint_id"), *(i.id for i in state.interrupts))
        if place == self._place:
            raise RuntimeError("the flow did not move on")
        self._place = place
        return state

    async def _follow(self, stream: AsyncIterator[Any], nodes: Nodes) -> None:
        """A task is announced before its step begins, and again with its result when it has ended."""
        clock = asyncio.get_running_loop().time
        moved = False
        async for within, mode, event in stream:
            if mode == "tasks":
                nodes.saw(within, event)
            if mode == "tasks" and not within and "input" not in event:
                moved = True
                await self._write_spans()
            elif mode == "tasks" and not within and moved and clock() >= self._until:
                # All that was done is saved, and nothing of this step has begun.
                self.stopped = True
                return
            elif mode == "custom" and isinstance(event, dict) and PROGRESS in event:
                self._progress = event[PROGRESS]
                if clock() >= self._progress_at:
                    await self._keep_progress()

    async def _write_spans(self) -> None:
        if self._pen.spans.many:
            async with self._pen.tx() as conn:
                await self._pen.spans.write(conn, self._thread_id)

    async def _keep_progress(self) -> None:
        if self._progress is None:
            return
        (done, total), self._progress = self._progress, None
        self._progress_at = asyncio.get_running_loop().time() + _BETWEEN_PROGRESS_S
        async with self._pen.tx() as conn:
            await threads.keep_progress(conn, self._thread_id, done, total)


def _first_questions(state: StateSnapshot, task_ids: Collection[str], within: str = "") -> set[str]:
    """Interrupt ids of what these tasks asked first, in this graph and its inner ones."""
    found: set[str] = set()
    for task in state.tasks:
        namespace = f"{within}{task.name}:{task.id}"
        if task.id in task_ids:
            found.add(Interrupt.from_ns(None, namespace).id)
        if isinstance(task.state, StateSnapshot):
            found |= _first_questions(task.state, task_ids, f"{namespace}|")
    return found


def _is_gone(state: StateSnapshot) -> bool:
    """Whether a task waits for something that the graph within it does not know."""
    inner = [task.state for task in state.tasks if task.interrupts and isinstance(task.state, StateSnapshot)]
    return any(not within.interrupts or _is_gone(within) for within in inner)
