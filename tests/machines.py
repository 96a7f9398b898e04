"""Machines of a test's own, each behind a cable that can be pulled: Linux network namespaces, each with its address.

A machine whose cable is pulled has vanished without a word: nothing that is sent to it or by it arrives, and nobody is
told. Only the time-outs of TCP find that out, which no proxy could show.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`inside` is its own address, and `outside` where it finds us."""

    inside: str
    outside: str
    _cable: str
    _holder: int

    @property
    def prefix(self) -> list[str]:
        """What is to stand before a command that is to run there."""
        return ["nsenter", f"--net=/proc/{self._holder}/ns/net"]

    def unplug(self) -> None:
        _run("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        _run("ip", "link", "set", self._cable, "up")


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """So many. They are gone with this process, whatever ends it."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_machine(number)) for number in range(count)]


def machines_are_to_be_had() -> bool:
    """Whether we may make one here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    try:
        with machines(1):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def _machine(number: int) -> Iterator[Machine]:
    # A network of four addresses for each cable, in a range that is this process's.
    network = f"10.213.{os.getpid() % 250}"
    outside, inside = f"{network}.{4 * number + 1}", f"{network}.{4 * number + 2}"
    near, far = f"cf{os.getpid()}-{number}", "cable"
    # It lives as long as our end of the pipe, and the namespace and its cable as long as anybody in it.
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            if not holder.stdout.readline():
                raise PermissionError("no network namespace may be made here")
            machine = Machine(inside=inside, outside=outside, _cable=near, _holder=holder.pid)
            _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(holder.pid))
            _run("ip", "address", "add", f"{outside}/30", "dev", near)
            _run("ip", "link", "set", near, "up")
            for words in (
                ["ip", "link", "set", "lo", "up"],
                ["ip", "address", "add", f"{inside}/30", "dev", far],
                ["ip", "link", "set", far, "up"],
                ["ip", "route", "add", "default", "via", outside],
            ):
                _run(*machine.prefix, *words)
            yield machine
        finally:
            # At once: the kernel takes its time with what belongs to a namespace that ends.
            subprocess.run(["ip", "link", "delete", near], check=False, stderr=subprocess.DEVNULL)
            holder.stdin.close()
            holder.wait()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
