"""The spans of calls to models that a flow makes through LangChain: of any chat model, and no flow knows of it.

Attributes are named as in https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/; what is asked and answered
is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from flow.spans import Live, Recorder, here


class ModelCalls(BaseCallbackHandler):
    """Records the calls of one run of a graph."""

    # On the caller's own thread and loop, where its span is known; it only takes the time.
    run_inline = True
    ignore_agent = ignore_chain = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[UUID, Live] = {}

    def on_chat_model_start(self, *_: Any, run_id: UUID, **about: Any) -> None:
        self._begin("chat", run_id, about)

    def on_llm_start(self, *_: Any, run_id: UUID, **about: Any) -> None:
        self._begin("text_completion", run_id, about)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        if (live := self._open.pop(run_id, None)) is not None:
            live.note(**_told(response))
            self._recorder.end(live)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        if (live := self._open.pop(run_id, None)) is not None:
            self._recorder.end(live, error=error)

    def _begin(self, operation: str, run_id: UUID, about: Mapping[str, Any]) -> None:
        metadata, parameters = about.get("metadata") or {}, about.get("invocation_params") or {}
        model = metadata.get("ls_model_name") or parameters.get("model") or parameters.get("model_name") or "model"
        self._open[run_id] = self._recorder.begin(
            f"{operation} {model}",
            kind="client",
            parent_id=here(),
            **{
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": str(metadata.get("ls_provider") or "unknown"),
                "gen_ai.request.model": str(model),
            },
        )


def _told(response: LLMResult) -> dict[str, str | int | None]:
    """The model that answered and the tokens that it took, as far as its provider says."""
    first = response.generations[0][0] if response.generations and response.generations[0] else None
    message = first.message if isinstance(first, ChatGeneration) else None
    if not isinstance(message, AIMessage):
        return {}
    used, said = message.usage_metadata, message.response_metadata
    model = said.get("model_name") or said.get("model")
    return {
        "gen_ai.response.model": str(model) if model else None,
        "gen_ai.usage.input_tokens": used["input_tokens"] if used else None,
        "gen_ai.usage.output_tokens": used["output_tokens"] if used else None,
    }
