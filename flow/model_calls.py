"""The spans of calls to models that a flow makes through LangChain: of any chat model, and no flow knows of it.

Attributes are named as in https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. What is asked and answered
is among them only if somebody wants it to be (TRACE_CONTENT).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from flow.spans import Live, Recorder, here, messages_kept

_LONGEST_NAME = 200
_ROLES = {"human": "user", "ai": "assistant"}


class ModelCalls(BaseCallbackHandler):
    """Records the calls of one run of a graph."""

    # On the caller's own thread and loop, where its span is known; it only takes the time.
    run_inline = True
    ignore_agent = ignore_chain = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[UUID, Live] = {}

    def on_chat_model_start(
        self,
        serialized: Any,  # noqa: ARG002 (LangChain's)
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        **about: Any,
    ) -> None:
        self._begin("chat", run_id, about, (_in_words(each) for batch in messages for each in batch))

    def on_llm_start(
        self,
        serialized: Any,  # noqa: ARG002 (LangChain's)
        prompts: list[str],
        *,
        run_id: UUID,
        **about: Any,
    ) -> None:
        self._begin("text_completion", run_id, about, (("user", prompt) for prompt in prompts))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        if (live := self._open.pop(run_id, None)) is not None:
            live.note(**_told(response))
            self._recorder.end(live)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        if (live := self._open.pop(run_id, None)) is not None:
            self._recorder.end(live, error=error)

    def _begin(self, operation: str, run_id: UUID, about: Mapping[str, Any], asked: Iterable[tuple[str, str]]) -> None:
        metadata, parameters = about.get("metadata") or {}, about.get("invocation_params") or {}
        model = metadata.get("ls_model_name") or parameters.get("model") or parameters.get("model_name") or "model"
        self._open[run_id] = self._recorder.begin(
            f"{operation} {model}",
            kind="client",
            parent_id=here(),
            **{
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": str(metadata.get("ls_provider") or "unknown"),
                "gen_ai.request.model": str(model)[:_LONGEST_NAME],
                "gen_ai.input.messages": messages_kept(asked),
            },
        )


def _told(response: LLMResult) -> dict[str, str | int | None]:
    """The model that answered and the tokens that it took, as far as its provider says."""
    first = response.generations[0][0] if response.generations and response.generations[0] else None
    message = first.message if isinstance(first, ChatGeneration) else None
    if not isinstance(message, AIMessage):
        return {"gen_ai.output.messages": messages_kept([("assistant", first.text)]) if first else None}
    used, said = message.usage_metadata, message.response_metadata
    model = said.get("model_name") or said.get("model")
    return {
        "gen_ai.response.model": str(model)[:_LONGEST_NAME] if model else None,
        "gen_ai.output.messages": messages_kept([_in_words(message)]),
        "gen_ai.usage.input_tokens": used["input_tokens"] if used else None,
        "gen_ai.usage.output_tokens": used["output_tokens"] if used else None,
    }


def _in_words(message: BaseMessage) -> tuple[str, str]:
    """Role and text of a message; of one with pictures or calls, its parts as JSON."""
    said = message.content
    text = said if isinstance(said, str) else json.dumps(said, default=str, ensure_ascii=False)
    return _ROLES.get(message.type, message.type), text
