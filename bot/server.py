"""Starts the services of one process, and ends them in order: requests first, drives next, messages last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import psycopg
from aiohttp import ClientSession
from aiohttp.web import Application, AppRunner, RouteDef, TCPSite, get

from bot.api import build_api
from bot.bots import Bots
from bot.deliver import Deliverer
from bot.desk import Audience
from bot.groups import OwnTeam, check_groups, groups_in
from bot.install import install_routes
from bot.links import link_routes
from bot.live import Live
from bot.login import login_routes
from bot.mail import Mailer
from bot.metrics import metrics_handler
from bot.openid import Provider, WorkspaceOf, slack_login_routes
from bot.pages import inbox_routes
from bot.pool import Pool, on_pool, pool_of
from bot.site import Site, TeamOf, no_team, static_files
from bot.slack import Background, Handler, build_bolt, check_token, events_at, slack_events
from bot.slack_api import slack_client
from bot.socket_mode import SocketMode
from bot.traces_out import TraceSender
from bot.web import Check, build_web
from bot.webhooks import endpoints_of
from bot.webhooks_out import WebhookDeliverer
from bot.workspaces import Clients, check_keys
from flow.assess import adviser_of
from flow.cipher import Cipher
from flow.database import check_locks, connect
from flow.errors import SettingError
from flow.exports import keep_targets
from flow.policy import is_group, policy_of
from flow.providers import provider_of
from flow.retention import Keep
from flow.sessions import session_secret, workspace_of_member
from flow.settings import Settings
from flow.starting import Checker
from flow.worker import Worker

log = logging.getLogger(__name__)

_DRAIN_S = 10.0


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM, SIGINT and the end of the terminal set; under `nohup` the last of these does not."""
    stop = asyncio.Event()
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def run_services(settings: Settings, url: str, stop: asyncio.Event, *, web: bool, worker: bool) -> None:
    """Run until `stop` is set. A service that fails ends them all, and its error rises in an ExceptionGroup."""
    provider_of(settings)
    policy_of(settings)
    log.info("who must approve what: %s", _whose_policy(settings))
    await check_locks(url)
    if settings.many_workspaces:
        async with await connect(url, "door") as conn:
            await check_keys(conn, Cipher.of(settings))
    await _forget_other_targets(settings, url)
    _say_what_is_off(settings)
    async with contextlib.AsyncExitStack() as stack:
        mailer = Mailer.of(settings) if settings.smtp_url else None
        deliverer = await stack.enter_async_context(Deliverer.of(settings)) if settings.slack_is_on else None
        webhooks = await stack.enter_async_context(WebhookDeliverer.of(settings)) if settings.webhook_url_of else None
        traces = await stack.enter_async_context(TraceSender.of(settings)) if settings.trace_targets else None
        driver = _worker_of(settings, url) if worker else None
        async with asyncio.TaskGroup() as group:
            delivering = [group.create_task(each.run(url)) for each in (deliverer, mailer, webhooks, traces) if each]
            driving = group.create_task(driver.run(stop)) if driver else None
            checks = _checks_of(deliverer, mailer, webhooks, driver)
            async with _site(settings, url, checks, driver, web=web):
                await stop.wait()
                log.info("stopping")
            if driving:
                await driving
            for task in delivering:
                task.cancel()


@contextlib.asynccontextmanager
async def _site(
    settings: Settings, url: str, checks: dict[str, Check], driver: Worker | None, *, web: bool
) -> AsyncIterator[None]:
    """The web server with its pool, and Slack's door; at the end, what is under way is answered and finished.

    Without `web` it is only the health and the metrics of this process, on HEALTH_PORT, if that is set.
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
        api, pages, live = None, [], Live()
        if web:
            checker = Checker()
            stack.push_async_callback(checker.close)
            api = build_api(pool, endpoints_of(settings), checker, many_workspaces=settings.many_workspaces)
        slack = _Slack()
        if web and settings.many_workspaces:
            slack = await stack.enter_async_context(_many_workspaces(settings, pool, background))
        elif web and settings.slack_is_on:
            slack = await stack.enter_async_context(_one_workspace(settings, pool, background, checks))
        if web and settings.pages_url is not None:
            await stack.enter_async_context(_listening(live, url))
            http = await stack.enter_async_context(ClientSession())
            pages = await _pages(settings, base=settings.pages_url, pool=pool, live=live, http=http, slack=slack)
        metrics = metrics_handler(settings, pool, driver)
        app = build_web(slack=slack.handler, api=api, pages=pages, metrics=metrics, checks=checks)
        _close_at_the_end(app, live)
        runner = AppRunner(app, access_log=None, shutdown_timeout=_DRAIN_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await TCPSite(runner, settings.host, port).start()
        except OSError as exc:
            raise SettingError(f"cannot listen on HOST {settings.host}, port {port}: {exc.strerror}") from exc
        log.info("listening on http://%s:%s", *runner.addresses[0][:2])
        yield


@dataclass(frozen=True, kw_only=True)
class _Slack:
    """The door of POST /slack/events, if there is one, whom to ask about a workspace's members, and, if there are many
    workspaces, what acts for each."""

    handler: Handler | None = None
    team_of: TeamOf = no_team
    clients: Clients | None = None


@contextlib.asynccontextmanager
async def _one_workspace(
    settings: Settings, pool: Pool, background: Background, checks: dict[str, Check]
) -> AsyncIterator[_Slack]:
    """That of SLACK_BOT_TOKEN."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(slack_client(settings))
        own_team = OwnTeam(client)
        await check_token(own_team)
        await check_groups(own_team, [*_groups(settings), *filter(is_group, settings.filer_names)])
        bolt = build_bolt(
            client, pool, own_team, background, audience=_audience(settings), public_url=settings.public_url
        )

        async def team_of(_: str | None) -> OwnTeam | None:
            return own_team

        handler = None
        if settings.slack_app_token is not None:
            socket = SocketMode(bolt, client, settings.slack_app_token.get_secret_value(), background)
            await stack.enter_async_context(_socket(socket))
            checks["socket mode"] = _checks("no connection to Slack", lambda: socket.connected)
        elif settings.slack_signing_secret is not None:
            handler = slack_events(bolt, settings.slack_signing_secret.get_secret_value())
        yield _Slack(handler=handler, team_of=team_of)


@contextlib.asynccontextmanager
async def _many_workspaces(settings: Settings, pool: Pool, background: Background) -> AsyncIterator[_Slack]:
    """Those that the app is installed in."""
    assert settings.slack_signing_secret is not None
    async with Clients.of(settings) as clients:
        bots = Bots(clients, pool, background, viewers=settings.viewer_names, public_url=settings.public_url)
        handler = events_at(bots.find, settings.slack_signing_secret.get_secret_value())
        yield _Slack(handler=handler, team_of=bots.team_of, clients=clients)


async def _pages(
    settings: Settings, *, base: str, pool: Pool, live: Live, http: ClientSession, slack: _Slack
) -> list[RouteDef]:
    """The routes of everything that people see in a browser."""
    async with pool.connection() as conn:
        secret = await session_secret(conn)
    provider = _openid_provider(settings)
    site = Site(
        pool=pool,
        url=base,
        secret=secret,
        viewers=settings.viewer_names,
        step_up_over=settings.step_up_over,
        slack_login=provider is not None,
        team_of=slack.team_of,
        # Whose policy names any is not known before somebody signs in.
        names_groups=settings.many_workspaces or bool(_groups(settings)),
    )
    routes = [*inbox_routes(site, live), *login_routes(site), *link_routes(site)]
    if provider is not None:
        workspace_of = _workspace_of(pool) if settings.many_workspaces else None
        routes += slack_login_routes(site, provider, http, workspace_of)
        if slack.clients is not None:
            routes += install_routes(site, provider, slack.clients)
            log.info("the app is installed at %s/slack/install", base)
    log.info("the inbox is at %s/approvals", base)
    return [*routes, get("/static/{name}", static_files())]


def _workspace_of(pool: Pool) -> WorkspaceOf:
    async def workspace_of(team_id: str, enterprise_id: str | None) -> str | None:
        return await on_pool(pool, lambda conn: workspace_of_member(conn, team_id, enterprise_id))

    return workspace_of


def _audience(settings: Settings) -> Audience:
    return Audience(viewers=settings.viewer_names, filers=settings.filer_names, names_groups=bool(_groups(settings)))


def _groups(settings: Settings) -> tuple[str, ...]:
    """The user groups that the policy names."""
    policy = policy_of(settings)
    return groups_in(map(policy.tier, policy.names))


def _openid_provider(settings: Settings) -> Provider | None:
    if settings.slack_client_id is None or settings.slack_client_secret is None:
        return None
    secret = settings.slack_client_secret.get_secret_value()
    return Provider.of(api_url=settings.slack_api_url, client_id=settings.slack_client_id, client_secret=secret)


@contextlib.asynccontextmanager
async def _listening(live: Live, url: str) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(live.run(url))
        try:
            yield
        finally:
            listening.cancel()


def _close_at_the_end(app: Application, live: Live) -> None:
    """Streams of events would otherwise be waited for until the time to end is over."""

    async def close(_: Application) -> None:
        live.close()

    app.on_shutdown.append(close)


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
    keep = Keep.of(settings)
    return Worker(url, drive_timeout_s=settings.drive_timeout, stand_by=settings.stand_by, keep=keep)


def _checks_of(
    deliverer: Deliverer | None, mailer: Mailer | None, webhooks: WebhookDeliverer | None, driver: Worker | None
) -> dict[str, Check]:
    checks: dict[str, Check] = {}
    if deliverer is not None:
        checks["deliverer"] = _checks("it does not hear the database", lambda: deliverer.connected)
    if mailer is not None:
        checks["mailer"] = _checks("it does not hear the database", lambda: mailer.connected)
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
                row = await (await conn.execute("SELECT current_setting('transaction_read_only') AS off")).fetchone()
                await conn.execute("SELECT max(version) FROM claim_flow_migrations")
        except psycopg.Error as exc:
            return str(exc).strip()
        return "it takes no writes" if row and row["off"] == "on" else None

    return check


async def _forget_other_targets(settings: Settings, url: str) -> None:
    """Nothing is kept for whom the settings do not name any more."""
    async with await connect(url, "door") as conn:
        await keep_targets(conn, settings.trace_targets)


def _whose_policy(settings: Settings) -> str:
    return "each workspace's own" if settings.many_workspaces else str(settings.policy_path or "APPROVERS")


def _say_what_is_off(settings: Settings) -> None:
    if not settings.slack_is_on:
        log.warning("Slack is off: see SLACK_BOT_TOKEN and what belongs to it in .env.example")
    elif not settings.many_workspaces and not settings.approvers and settings.policy_path is None:
        log.warning("APPROVERS is empty: every click in Slack will be refused")
    if settings.pages_url is None:
        log.warning("the web inbox is off: set PUBLIC_URL to where browsers reach this machine")
    if adviser_of(settings) is None:
        log.info("no model advises on claims: see OPENROUTER_API_KEY and OPENAI_API_KEY in .env.example")
