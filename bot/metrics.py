"""`/metrics` for Prometheus: what this process has done, how things stand in the database, and its pool.

The database is asked at most every few seconds, however often and by however many it is asked for here. A scrape while
the database is away says so, and what the process itself knows.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import psycopg
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bot.pool import Pool
from flow.counts import COUNTS, TIMES, Count, Times
from flow.database import AWAY
from flow.figures import Figure, figures
from flow.settings import Settings
from flow.worker import Worker

log = logging.getLogger(__name__)

# Prometheus asks every 15 s or more; several of them, or a person who reloads, cost the database nothing more.
_FRESH_S = 5.0
# A scrape has 10 s by default.
_POOL_TIMEOUT_S = 2.0


def metrics_handler(
    settings: Settings, pool: Pool, worker: Worker | None
) -> Callable[[web.Request], Awaitable[web.Response]] | None:
    """The handler of /metrics; None without METRICS_TOKEN: how many claims wait for whom is nobody else's business."""
    if settings.metrics_token is None:
        return None
    token = settings.metrics_token.get_secret_value().encode()
    standing = _Standing(pool, slack=settings.slack_is_on, mail=settings.smtp_url is not None)

    async def handle(request: web.Request) -> web.Response:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token):
            return web.json_response(
                {"error": "METRICS_TOKEN is needed, as a bearer token"},
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        here = [*_pool_figures(pool), *([_standbys(worker)] if worker else [])]
        text = exposition([*here, *await standing.look()])
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"})

    return handle


def exposition(standing: Iterable[Figure], counts: Iterable[Count] = COUNTS, times: Iterable[Times] = TIMES) -> bytes:
    """Everything in Prometheus's text format, with what the process uses."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Ours(standing, counts, times))
    return generate_latest(registry)


class _Ours(Collector):
    def __init__(self, standing: Iterable[Figure], counts: Iterable[Count], times: Iterable[Times]) -> None:
        self._standing, self._counts, self._times = standing, counts, times

    def collect(self) -> Iterator[Metric]:
        for figure in self._standing:
            gauge = GaugeMetricFamily(figure.name, figure.help, labels=figure.labels)
            for labels, value in figure.values.items():
                gauge.add_metric(labels, value)
            yield gauge
        for count in self._counts:
            counter = CounterMetricFamily(count.name, count.help, labels=count.labels)
            for labels, number in count.values.items():
                counter.add_metric(labels, number)
            yield counter
        for taken in self._times:
            bounds = [*map(str, taken.bounds), "+Inf"]
            yield HistogramMetricFamily(
                taken.name, taken.help, buckets=list(zip(bounds, taken.cumulative, strict=True)), sum_value=taken.sum_s
            )


class _Standing:
    """How things stand in the database, as of a few seconds ago at most."""

    def __init__(self, pool: Pool, *, slack: bool, mail: bool) -> None:
        self._pool, self._slack, self._mail = pool, slack, mail
        self._known: Sequence[Figure] = ()
        self._looked_at: float | None = None
        # Whoever comes while somebody looks waits, and takes what that one has found.
        self._one_at_a_time = asyncio.Lock()

    async def look(self) -> Sequence[Figure]:
        clock = asyncio.get_running_loop().time
        async with self._one_at_a_time:
            if self._looked_at is None or clock() >= self._looked_at + _FRESH_S:
                self._known = await self._ask()
                self._looked_at = clock()
        return self._known

    async def _ask(self) -> Sequence[Figure]:
        try:
            async with self._pool.connection(timeout=_POOL_TIMEOUT_S) as conn:
                return [_database_is(up=True), *await figures(conn, slack=self._slack, mail=self._mail)]
        except (psycopg.Error, *AWAY) as exc:
            log.warning("the database does not say how things stand: %s", str(exc).strip())
            return [_database_is(up=False)]


def _database_is(*, up: bool) -> Figure:
    what = "1 if the database said how things stand; else 0, and the figures that come from it are missing."
    return Figure(name="claim_flow_database_up", help=what, values={(): float(up)})


def _pool_figures(pool: Pool) -> list[Figure]:
    stats = pool.get_stats()
    idle = stats.get("pool_available", 0)
    return [
        Figure(
            name="claim_flow_pool_connections",
            help="Connections of this process for requests.",
            labels=("state",),
            values={("idle",): idle, ("used",): stats.get("pool_size", 0) - idle},
        ),
        Figure(
            name="claim_flow_pool_most_connections",
            help="The most of them that there may be.",
            values={(): stats.get("pool_max", 0)},
        ),
        Figure(
            name="claim_flow_pool_waiting_requests",
            help="Requests that wait for one.",
            values={(): stats.get("requests_waiting", 0)},
        ),
    ]


def _standbys(worker: Worker) -> Figure:
    return Figure(
        name="claim_flow_ready_standbys",
        help="Fresh processes of this worker that wait for a thread.",
        values={(): worker.ready},
    )
