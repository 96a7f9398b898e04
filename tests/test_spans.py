"""Spans: what is recorded of a thread, by whom, and what never is."""

from __future__ import annotations

from flow.database import Connection
from flow.spans import WRITTEN, Recorder, recorded_by, span, spans_of
from tests.driving import start_claim


async def test_spans_are_written_by_the_statement_that_ends_the_work(conn: Connection) -> None:
    await start_claim(conn, "t1", "20")
    recorder = Recorder(around=lambda: None)
    with recorded_by(recorder), span("outer") as outer, span("POST", kind="client") as call:
        call.note(**{"http.response.status_code": 200, "what": "NUL \x00 and \ud800", "not": float("nan")})
    for _ in range(2):
        await conn.execute(
            f"WITH {WRITTEN} UPDATE threads SET status = 'running' WHERE thread_id = %(thread_id)s",
            {"thread_id": "t1", "spans": recorder.rows()},
        )
    written = {each.name: each for each in await spans_of(conn, "t1")}
    assert sorted(written) == ["POST", "outer"]
    assert written["POST"].parent_id == outer.span_id == written["outer"].span_id
    assert written["POST"].attributes == {"http.response.status_code": 200, "what": "NUL � and �", "not": "nan"}
