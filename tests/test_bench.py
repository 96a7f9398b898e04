"""The benchmark runs. What it says is for whoever reads it, on a machine that does nothing else."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tests.bench.warm_processes import ROWS
from tests.processes import ROOT


@pytest.mark.timeout(300)
async def test_the_benchmark_of_warm_processes_prints_every_row(server_url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench", "--quick", "--rounds", "1", "--only", "warm"),
        cwd=ROOT,
        # Whether the one with an environment of its own can be had is not this test's business.
        env=os.environ | {"TEST_DATABASE_URL": server_url, "UV_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "commits until a claim pauses" in err.decode()
    rows = [line for line in out.decode().splitlines() if line.startswith(tuple({row.ours for row in ROWS}))]
    assert len(rows) == len(ROWS), out.decode()
    against_itself = [line for line in rows if "LangGraph: " in line]
    assert all("x" in line.split("ms")[-1] for line in against_itself), out.decode()
