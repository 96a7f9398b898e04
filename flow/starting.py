"""What a new thread is started with, checked by its flow before anything is written.

A claim is checked here, without LangGraph. Every other flow is checked by its own model, which means importing its
module: the command line does that itself, and a web server has a process for it (`Checker`), since the code of a flow
may do anything, and takes seconds to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from flow import inputs
from flow.errors import BadInput, FlowError, NotChecked, UnknownFlow
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION
from flow.settings import Settings, read_settings

# An import of LangGraph and of somebody's modules, on a busy machine.
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class New:
    """What a new thread's row says: the flow, in the version that new threads get, and its input."""

    flow: str
    flow_version: str
    input: dict[str, Any]


class ClaimInput(BaseModel):
    """A claim as it is filed; `flow.inputs` has the last word on each field."""

    model_config = ConfigDict(extra="forbid")

    amount: str
    currency: str = "USD"
    payee: str = ""
    note: str = ""


def filed(settings: Settings, flow: str, given: dict[str, Any]) -> New:
    """The new thread of this flow. Raises BadInput, UnknownFlow, SettingError.

    The input of another flow than the claims' is kept as it was given, so that the same is the same at every door; the
    drive makes the state of what the flow's model makes of it.
    """
    if flow == CLAIM_FLOW:
        return filed_claim(given)
    inputs.check_object(given)
    return _filed(settings.flow_modules, flow, given)


def _filed(modules: Sequence[str], flow: str, given: dict[str, Any]) -> New:
    from flow.flows import newest_flow

    found = newest_flow(modules, flow)
    found.compile()
    found.checked(given)
    return New(flow=found.name, flow_version=found.version, input=given)


def filed_claim(given: dict[str, Any]) -> New:
    """The new thread of a claim. Raises BadInput."""
    try:
        claim = inputs.parse_claim(**ClaimInput.model_validate(given).model_dump())
    except ValidationError as exc:
        raise inputs.refused(exc) from exc
    return New(flow=CLAIM_FLOW, flow_version=CLAIM_FLOW_VERSION, input=claim.as_input())


class Checker:
    """Checks what threads are started with, in a process of its own that is begun at the first question."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._alone = asyncio.Lock()

    async def filed(self, flow: str, given: dict[str, Any]) -> New:
        """As `filed` above. Raises NotChecked, too, if the process cannot be had."""
        if flow == CLAIM_FLOW:
            return filed_claim(given)
        inputs.check_object(given)
        async with self._alone:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    answer = await self._ask({"flow": flow, "input": given})
            except (TimeoutError, OSError, ValueError) as exc:
                await self.close()
                raise NotChecked(flow, str(exc) or type(exc).__name__) from exc
            except asyncio.CancelledError:
                # Its answer would be taken for the next one's.
                await self.close()
                raise
        if "version" in answer:
            return New(flow=flow, flow_version=answer["version"], input=given)
        if answer["error"] == "flow":
            raise UnknownFlow(flow, answer["known"])
        if answer["error"] == "input":
            raise BadInput(answer["name"], answer["value"], answer["expected"])
        raise NotChecked(flow, answer["why"])

    async def names(self) -> tuple[str, ...]:
        """Of all flows that can be started. Raises NotChecked."""
        try:
            await self.filed("", {})
        except UnknownFlow as exc:
            return exc.known
        raise AssertionError("a flow without a name")

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "flow.starting",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise ValueError("the process that checks it has died: its last words are in the log")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _answer(modules: Sequence[str], question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"version": _filed(modules, question["flow"], question["input"]).flow_version}
    except UnknownFlow as exc:
        return {"error": "flow", "known": list(exc.known)}
    except BadInput as exc:
        return {"error": "input", "name": exc.name, "value": repr(exc.value)[:200], "expected": exc.expected}
    except FlowError as exc:
        return {"error": "other", "why": str(exc)}


def _main() -> None:
    """Answer questions until whoever asks is gone. What a module prints, in whatever way, is no answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A person waits for the bot's answer to a click.
    os.nice(10)
    modules = read_settings().flow_modules
    for line in sys.stdin:
        print(json.dumps(_answer(modules, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _main()
