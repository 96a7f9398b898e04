"""LangGraph's Postgres saver, which refuses in our words what it could not keep."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import RESUME

from flow.errors import UnstorableState
from flow.inputs import storable_value
from flow.pen import Pen


class Serializer(JsonPlusSerializer):
    """LangGraph's own, but what the saver could not store is refused when a node returns it, and named.

    Text and floats stand in the checkpoint's JSON, which Postgres refuses with NUL, lone surrogates, NaN and infinity:
    the step's results would be stored, its checkpoint not, and the thread be dead.
    """

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        check_kept(obj)
        try:
            return super().dumps_typed(obj)
        except (TypeError, ValueError, RecursionError) as exc:
            raise UnstorableState(f"a node returned or asked what no checkpoint can hold ({exc})") from exc


def check_kept(value: Any) -> None:
    """Raise UnstorableState for what a checkpoint's JSON cannot hold."""
    if isinstance(value, str | float) and not storable_value(value):
        raise UnstorableState(f"a node returned {value!a:.60}, which no checkpoint can hold")


class Saver(AsyncPostgresSaver):
    """On the pen's connection and under its lock.

    A step's results and its checkpoint are written side by side: whichever is first, it is refused in our words.
    `answered` are the ids of tasks that were seen to have had an answer, and have not ended.
    """

    def __init__(self, pen: Pen) -> None:
        super().__init__(pen.conn, serde=Serializer())
        self.lock = pen.lock
        self.answered: set[str] = set()

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        found = await super().aget_tuple(config)
        pending = found.pending_writes if found is not None else None
        self.answered |= {task_id for task_id, channel, _ in pending or () if channel == RESUME}
        return found

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        for value in checkpoint["channel_values"].values():
            check_kept(value)
        return await super().aput(config, checkpoint, metadata, new_versions)
