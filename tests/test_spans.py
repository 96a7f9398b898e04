"""Spans: what is recorded of a thread, by whom, and what never is."""

from __future__ import annotations

from flow.database import Connection
from flow.flows import Flows
from flow.spans import Recorder, recorded_by, span, spans_of
from tests.driving import run
from tests.people import start_claim


async def test_whatever_a_span_is_told_can_be_written(conn: Connection) -> None:
    recorder = Recorder("work")
    with recorded_by(recorder), span("outer\x00") as outer, span("POST", kind="client") as call:
        call.note(**{"http.response.status_code": 200, "what": "NUL \x00 and \ud800", "not": float("nan")})
    await recorder.write(conn, "t1")
    written = {each.name: each for each in await spans_of(conn, "t1")}
    assert sorted(written) == ["POST", "outer�"]
    assert written["POST"].parent_id == outer.span_id == written["outer�"].span_id
    assert written["POST"].attributes == {"http.response.status_code": 200, "what": "NUL � and �", "not": "nan"}


async def test_a_drive(conn: Connection, flows: Flows) -> None:
    await start_claim(conn, "t1", "20")
    await run(conn, flows)
    for each in await spans_of(conn, "t1"):
        print(each)
    assert 0
