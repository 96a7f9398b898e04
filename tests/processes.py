"""Real processes that run one function: forked, so that twenty of them do not import LangGraph twenty times."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

# Where the code under test is, whatever the working directory.
ROOT = Path(__file__).parent.parent

# Nothing here takes nearly as long, on a machine that has other things to do.
_PATIENCE_S = 90.0

# Called by a process when it is ready for what all are to do at once; returns when all are.
Meet = Callable[[], object]


def start_process(target: Callable[..., None], *args: object) -> BaseProcess:
    process = _forkserver().Process(target=target, args=args, daemon=True)
    process.start()
    return process


async def end_of(process: BaseProcess) -> int:
    """Its exit code, or the negative signal that killed it, once it has ended."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(process.sentinel, ended.set)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_together(count: int, target: Callable[..., str], *args: object) -> list[str]:
    """What `count` processes returned that ran `target(meet, *args)`; an exception's text if one raised."""
    context = _forkserver()
    barrier, answers = context.Barrier(count), context.SimpleQueue()
    processes = [start_process(_answer, barrier, answers, target, *args) for _ in range(count)]
    for process in processes:
        process.join(_PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * count
    return [answers.get() for _ in range(count)]


def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pytest", "flow.patterns", "flow.drive", "flow.embedded", "tests.processes", "tests.victims"]
    )
    # It imports from the working directory first.
    with contextlib.chdir(ROOT):
        forkserver.ensure_running()
    return context


def _answer(barrier: Barrier, answers: SimpleQueue[str], target: Callable[..., str], *args: object) -> None:
    try:
        answers.put(target(lambda: barrier.wait(60), *args))
    except Exception as exc:  # noqa: BLE001 - the test wants to see it, whatever it is
        answers.put(f"{type(exc).__name__}: {exc}")
