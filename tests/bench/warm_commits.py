"""The floor: nothing but so many commits of one short row each, for a start and for a resume, in a warm process.

DATABASE_URL=… python -m tests.bench.warm_commits 14 12
"""

from __future__ import annotations

import asyncio
import os
import sys

from psycopg import AsyncConnection

from tests.bench.warm import answer


async def _main(of_start: int, of_resume: int) -> None:
    conn = await AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=0)
    await conn.execute("CREATE TABLE IF NOT EXISTS bare (id bigint GENERATED ALWAYS AS IDENTITY, of text NOT NULL)")

    async def commit(times: int, thread_id: str) -> None:
        for _ in range(times):
            await conn.execute("INSERT INTO bare (of) VALUES (%s)", (thread_id,))

    async def start(thread_id: str) -> None:
        await commit(of_start, thread_id)

    async def resume(thread_id: str) -> None:
        await commit(of_resume, thread_id)

    await answer(start=start, resume=resume)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))
