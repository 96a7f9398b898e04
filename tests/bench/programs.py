"""The two programs as whole processes: the same interpreter, the same bytecode, the same environment for both."""

from __future__ import annotations

import asyncio
import compileall
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Literal

import aiohttp

from flow.settings import Settings
from tests.local_slack import free_port

_ROOT = Path(__file__).parents[2]
CLAIM_FLOW = _ROOT / "claim_flow.py"
PLAIN_SCRIPT = Path(__file__).with_name("plain_script.py")

# A new interpreter imports LangGraph in 1 to 4 s; a loaded machine may need far longer.
_READY_WITHIN_S = 90.0
_STOPPED_WITHIN_S = 30.0

# The setting that says where a service answers.
_PORT_OF = {"serve": "PORT", "bot": "PORT", "work": "HEALTH_PORT"}

# What would send a claim to a stranger, or make one of the sides do more than the other.
_FOREIGN_PREFIXES = ("LANGSMITH_", "LANGCHAIN_", "LANGGRAPH_", "LANGFUSE_", "OPENAI_", "OTEL_")


def compile_bytecode() -> None:
    """Compile what an installer does not. What else is missing, the warm-up round writes, for both sides alike."""
    for folder in (_ROOT / "flow", _ROOT / "bot", PLAIN_SCRIPT.parent):
        compileall.compile_dir(folder, quiet=1)


def environment(**settings: str) -> dict[str, str]:
    """This process's environment with these settings and no others of ours.

    Python's own switches are dropped too: PYTHONDONTWRITEBYTECODE would make both sides compile for ever.
    """
    ours = {name.upper() for name in Settings.model_fields}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.upper() not in ours
        and not name.upper().startswith(_FOREIGN_PREFIXES)
        and (name == "PYTHONPATH" or not name.startswith("PYTHON"))
    }
    return kept | settings


async def timed_ms(program: Path, *args: str, env: Mapping[str, str], cwd: Path) -> float:
    """How long the whole process takes, from before it is made until it is gone. Raises if it fails."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        *args,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _, errors = await process.communicate()
    took_ms = (time.perf_counter() - began) * 1000
    if process.returncode != 0:
        raise RuntimeError(f"{program.name} {' '.join(args)} ended with {process.returncode}: {errors.decode()}")
    return took_ms


@contextlib.asynccontextmanager
async def serving(env: Mapping[str, str], cwd: Path, http: aiohttp.ClientSession) -> AsyncIterator[str]:
    """`claim_flow.py serve`, ready for clicks: its URL."""
    async with running("serve", env, cwd, http) as (url, _):
        yield url


@contextlib.asynccontextmanager
async def running(
    command: Literal["serve", "bot", "work"], env: Mapping[str, str], cwd: Path, http: aiohttp.ClientSession
) -> AsyncIterator[tuple[str, int]]:
    """A service that is ready: where it answers requests, and its process id. Its log goes to a file in `cwd`."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", cwd / f"{command}-{port}.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(CLAIM_FLOW),
            command,
            env={**env, "HOST": "127.0.0.1", _PORT_OF[command]: str(port)},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        deadline = time.monotonic() + _READY_WITHIN_S
        while not await _is_ready(http, url):
            if process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`claim_flow.py {command}` does not get ready: {log.read_text()}")
            await asyncio.sleep(0.05)
        yield url, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOPPED_WITHIN_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(f"{url}/readyz") as answer:
            return answer.status == 200
    return False
