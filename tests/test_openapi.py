"""The API is what its description says, whatever is sent: examined from outside by schemathesis."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bot.api import ROUTES
from bot.openapi import as_page, describe
from flow.database import Connection
from flow.drive import drive
from flow.flows import Flows
from flow.policy import LIMITS, OneTier
from tests.api_door import api_in_process, token
from tests.people import start_claim

# What a schema cannot say (an amount's decimals go by its currency, an approval is decided once) is a refusal, too.
_CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "410", "422"]

[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "413", "415", "422"]
"""


@pytest.mark.timeout(600)
async def test_nothing_that_is_sent_breaks_the_api_or_its_description(
    tmp_path: Path, database_url: str, conn: Connection, flows: Flows
) -> None:
    policy = OneTier(approvers=("api:robot",), limits=LIMITS)
    for number in range(3):
        await start_claim(conn, f"t{number}")
        await drive(conn, f"t{number}", flows=flows, policy=policy)
    secret = await token(conn)
    (tmp_path / "schemathesis.toml").write_text(_CONFIG)
    async with api_in_process(database_url, most_refused=100_000, most_decisions=100_000) as url:
        examiner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *("--checks", "all", "--max-examples", "50", "--header", f"Authorization: Bearer {secret}"),
            *("--no-color", "--generation-database", "none"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await examiner.communicate()
    assert examiner.returncode == 0, said.decode()[-6000:]


def test_the_description_names_every_route_and_what_it_refuses() -> None:
    described = describe(ROUTES, version="1")
    assert described["openapi"] == "3.1.0"
    named = {(method.upper(), path) for path, operations in described["paths"].items() for method in operations}
    assert named == {(route.method, f"/api{route.path}") for route in ROUTES}
    decision = described["paths"]["/api/approvals/{interrupt_id}/decision"]["post"]
    assert {"200", "400", "401", "403", "404", "409", "410", "413", "415", "503"} <= set(decision["responses"])
    assert decision["security"] == [{"token": []}, {"signature": []}]


async def test_the_page_for_people_loads_nothing_from_elsewhere(database_url: str) -> None:
    async with api_in_process(database_url) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/docs") as answer:
            page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        async with session.get(f"{url}/openapi.json") as answer:
            described: dict[str, Any] = await answer.json()
    assert policy.startswith("default-src 'none'")
    assert "<script" not in page
    assert "src=" not in page
    for path in described["paths"]:
        assert path in page


def test_what_a_description_says_is_escaped_on_the_page() -> None:
    described = json.loads(json.dumps(describe(ROUTES, version="1")))
    described["paths"]["/api/threads"]["post"]["summary"] = "<script>alert(1)</script>"
    assert "<script>alert" not in as_page(described)
