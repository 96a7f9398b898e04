"""Real processes that run one function: forked, so that twenty of them do not import LangGraph twenty times."""

from __future__ import annotations

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

# Called by a process when it is ready for what all are to do at once; returns when all are.
Meet = Callable[[], object]


def start_process(target: Callable[..., None], *args: object) -> BaseProcess:
    process = _forkserver().Process(target=target, args=args, daemon=True)
    process.start()
    return process


def run_together(count: int, target: Callable[..., str], *args: object) -> list[str]:
    """What `count` processes returned that ran `target(meet, *args)`; an exception's text if one raised."""
    context = _forkserver()
    barrier, answers = context.Barrier(count), context.SimpleQueue()
    processes = [start_process(_answer, barrier, answers, target, *args) for _ in range(count)]
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [0] * count
    return [answers.get() for _ in range(count)]


def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "flow.drive", "flow.embedded", "tests.processes"])
    # It imports from the working directory first.
    with contextlib.chdir(ROOT):
        forkserver.ensure_running()
    return context


def _answer(barrier: Barrier, answers: SimpleQueue[str], target: Callable[..., str], *args: object) -> None:
    try:
        answers.put(target(lambda: barrier.wait(60), *args))
    except Exception as exc:  # noqa: BLE001 - the test wants to see it, whatever it is
        answers.put(f"{type(exc).__name__}: {exc}")
