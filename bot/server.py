"""Starts the services of one process, and ends them in order: requests first, drives next, messages last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable

import psycopg
from aiohttp.web import AppRunner, TCPSite

from bot.api import build_api
from bot.deliver import Deliverer
from bot.pool import Pool, pool_of
from bot.slack import Background, OwnTeam, build_bolt, check_token, slack_events
from bot.slack_api import slack_client
from bot.socket_mode import SocketMode
from bot.web import Check, build_web
from bot.webhooks import endpoints_of
from bot.webhooks_out import WebhookDeliverer
from flow.assess import adviser_of
from flow.database import check_locks
from flow.errors import SettingError
from flow.providers import provider_of
from flow.settings import Settings
from flow.worker import Worker

log = logging.getLogger(__name__)

_DRAIN_S = 10.0


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM, SIGINT and the end of the terminal set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def run_services(settings: Settings, url: str, stop: asyncio.Event, *, web: bool, worker: bool) -> None:
    """Run until `stop` is set. A service that fails ends them all, and its error rises in an ExceptionGroup."""
    provider_of(settings)
    await check_locks(url)
    _say_what_is_off(settings)
    async with contextlib.AsyncExitStack() as stack:
        deliverer = await stack.enter_async_context(Deliverer.of(settings)) if settings.slack_is_on else None
        webhooks = await stack.enter_async_context(WebhookDeliverer.of(settings)) if settings.webhook_url_of else None
        driver = _worker_of(settings, url) if worker else None
        async with asyncio.TaskGroup() as group:
            delivering = [group.create_task(each.run(url)) for each in (deliverer, webhooks) if each]
            driving = group.create_task(driver.run(stop)) if driver else None
            checks = _checks_of(deliverer, webhooks, driver)
            async with _site(settings, url, checks, web=web):
                await stop.wait()
                log.info("stopping")
            if driving:
                await driving
            for task in delivering:
                task.cancel()


@contextlib.asynccontextmanager
async def _site(settings: Settings, url: str, checks: dict[str, Check], *, web: bool) -> AsyncIterator[None]:
    """The web server with its pool, and Slack's door; at the end, what is under way is answered and finished.

    Without `web` it is only the health of this process, on HEALTH_PORT, if that is set.
    """
    port = settings.port if web else settings.health_port
    if port is None:
        yield
        return
    background = Background()
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(pool_of(url))
        checks["database"] = _checks_database(pool)
        stack.push_async_callback(background.drain, _DRAIN_S)
        handler, api = None, None
        if web:
            api = build_api(pool, endpoints_of(settings))
        if web and settings.slack_is_on:
            client = await stack.enter_async_context(slack_client(settings))
            own_team = OwnTeam(client)
            await check_token(own_team)
            bolt = build_bolt(client, pool, own_team, background)
            if settings.slack_app_token is not None:
                socket = SocketMode(bolt, client, settings.slack_app_token.get_secret_value(), background)
                await stack.enter_async_context(_socket(socket))
                checks["socket mode"] = _checks("no connection to Slack", lambda: socket.connected)
            elif settings.slack_signing_secret is not None:
                handler = slack_events(bolt, settings.slack_signing_secret.get_secret_value())
        runner = AppRunner(build_web(slack=handler, api=api, checks=checks), access_log=None, shutdown_timeout=_DRAIN_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await TCPSite(runner, settings.host, port).start()
        except OSError as exc:
            raise SettingError(f"cannot listen on HOST {settings.host}, port {port}: {exc.strerror}") from exc
        log.info("listening on http://%s:%s", *runner.addresses[0][:2])
        yield


@contextlib.asynccontextmanager
async def _socket(socket: SocketMode) -> AsyncIterator[None]:
    """The open websocket. Its silence ends the block with SlackIsSilent, as a failed service does."""
    await socket.open()
    log.info("connected to Slack by Socket Mode")
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(socket.watch())
        try:
            yield
        finally:
            watching.cancel()
            await socket.close()


def _worker_of(settings: Settings, url: str) -> Worker:
    return Worker(url, drive_timeout_s=settings.drive_timeout, stand_by=settings.stand_by)


def _checks_of(
    deliverer: Deliverer | None, webhooks: WebhookDeliverer | None, driver: Worker | None
) -> dict[str, Check]:
    checks: dict[str, Check] = {}
    if deliverer is not None:
        checks["deliverer"] = _checks("it does not hear the database", lambda: deliverer.connected)
    if webhooks is not None:
        checks["webhooks"] = _checks("they do not hear the database", lambda: webhooks.connected)
    if driver is not None:
        checks["worker"] = _checks("no stand-by has come up, or the database is not heard", lambda: driver.works)
    return checks


def _checks(wrong: str, holds: Callable[[], bool]) -> Check:
    async def check() -> str | None:
        return None if holds() else wrong

    return check


def _checks_database(pool: Pool) -> Check:
    async def check() -> str | None:
        try:
            async with pool.connection(timeout=1.0) as conn:
                await conn.execute("SELECT max(version) FROM claim_flow_migrations")
        except psycopg.Error as exc:
            return str(exc).strip()
        return None

    return check


def _say_what_is_off(settings: Settings) -> None:
    if not settings.slack_is_on:
        log.warning("Slack is off: see SLACK_BOT_TOKEN and what belongs to it in .env.example")
    elif not settings.approvers:
        log.warning("APPROVERS is empty: every click in Slack will be refused")
    if adviser_of(settings) is None:
        log.info("no model advises on claims: see OPENROUTER_API_KEY and OPENAI_API_KEY in .env.example")
