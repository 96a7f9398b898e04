"""The page behind a link that one person got: it shows one request, and its form decides it, once.

Looking changes nothing, however often and by whomever: mail scanners follow links, and some run scripts. Only a form
that comes back with the cookie of the browser that it was shown in decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from bot.answers import Misfilled
from bot.forms import Filled, Refused, typed_in, verdict_of
from bot.outcomes import TAMPERED
from bot.pool import on_pool
from bot.site import Site, see_other
from flow.approvals import approval_of
from flow.database import Connection
from flow.errors import BadInput, CodeWrong
from flow.links import Link, link_of, spend, wants_code
from flow.model import Approval
from flow.questions import question_of
from flow.show import Story, stories_of
from flow.threads import thread_of

# The name of a link's token in paths; its cookie, which says what was decided, has another.
_PATH = "/a/{token:[A-Za-z0-9_-]{43}}"


def link_routes(site: Site) -> list[web.RouteDef]:
    """The page of a link, its form, and the page after it, whose address holds no token."""
    links = _Links(site)
    return [
        web.get(_PATH, site.handler(links.show, referrer="no-referrer")),
        web.post(_PATH, site.handler(links.decide, referrer="no-referrer")),
        web.get("/a/done", site.handler(links.done, referrer="no-referrer")),
    ]


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What a link is about."""

    link: Link
    approval: Approval
    story: Story


class _Links:
    """The handlers."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def show(self, request: web.Request) -> web.Response:
        token = request.match_info["token"]
        self._site.count(self._site.tokens, request)
        return self._page(request, token, await self._look(token), Filled())

    async def decide(self, request: web.Request) -> web.Response:
        token = request.match_info["token"]
        self._site.count(self._site.tokens, request)
        form = await self._site.form(request, self._site.known_visitor(request) + token)
        code = "".join(form.one("code").split())
        shown = await self._look(token, spent=True)
        question = question_of(shown.approval.request)
        self._site.count(self._site.decisions, request, shown.link.person)
        step_up = wants_code(shown.approval.request, self._site.step_up_over)
        try:
            verdict = verdict_of(form, question, door="link")
            decided = await on_pool(
                self._site.pool, lambda conn: spend(conn, token, verdict, code=code, step_up=step_up)
            )
        except CodeWrong as exc:
            filled = Filled(reason=verdict.reason, option=form.one("option"), typed=typed_in(form, question))
            return self._page(request, token, await self._look(token), filled, wrong=exc)
        except (Misfilled, BadInput) as exc:
            if question.kind == "claim":
                raise
            return self._page(request, token, await self._look(token), Filled.of(form, question, exc))
        answer = see_other("/a/done")
        said = f"{shown.link.id}~{decided.approval.interrupt_id}~{verdict.verdict}"
        self._site.set_cookie(answer, "decided", self._site.signed(said, use="decided"), strict=True, max_age_s=3600)
        return answer

    async def done(self, request: web.Request) -> web.Response:
        """What the holder of the cookie has decided, and what became of it since."""
        said = self._site.unsigned(self._site.cookie(request, "decided"), use="decided")
        if said is None:
            raise Refused(404, "There is nothing here", "Open the link that you got once more.")
        _, interrupt_id, verdict = said.split("~")
        story, approval = await on_pool(self._site.pool, lambda conn: _story(conn, interrupt_id))
        return self._site.page(
            "link_done.html", approval=approval, thread=story.thread, payment=story.payment, verdict=verdict
        )

    def _page(
        self, request: web.Request, token: str, shown: _Shown, filled: Filled, *, wrong: CodeWrong | None = None
    ) -> web.Response:
        visitor = self._site.visitor(request)
        page = self._site.page(
            "link.html",
            status=403 if wrong else 422 if filled.errors else 200,
            approval=shown.approval,
            thread=shown.story.thread,
            advice=shown.story.advice,
            owner=shown.link.owner,
            wants_code=wants_code(shown.approval.request, self._site.step_up_over),
            tries_left=shown.link.tries_left,
            wrong=wrong,
            filled=filled,
            visitor_token=self._site.form_token(visitor + token),
        )
        self._site.remember_visitor(page, visitor)
        return page

    async def _look(self, token: str, *, spent: bool = False) -> _Shown:
        """What the link is about. Raises Refused unless it is open; `spent`, for a button that is pressed twice."""

        async def look(conn: Connection) -> _Shown | None:
            link = await link_of(conn, token)
            if link is None:
                return None
            story, approval = await _story(conn, link.interrupt_id)
            return _Shown(link=link, approval=approval, story=story)

        shown = await on_pool(self._site.pool, look)
        if shown is None or shown.link.revoked_at is not None:
            raise Refused(410, "This link is no good", "It was revoked, is long over, or was copied in part.")
        if spent:
            return shown
        if shown.approval.tampered:
            raise Refused(409, "Not as it was asked", TAMPERED)
        if shown.link.used_at is not None:
            raise Refused(410, "This link was used", "A decision was made with it. It works once.")
        if shown.approval.status != "pending":
            by = shown.approval.settled_by
            who = f" by {by.person_name}" if by else ""
            raise Refused(410, "Nothing is left to decide", f"This request is {shown.approval.status} already{who}.")
        return shown


async def _story(conn: Connection, interrupt_id: str) -> tuple[Story, Approval]:
    approval = await approval_of(conn, interrupt_id)
    [story] = await stories_of(conn, [await thread_of(conn, approval.thread_id)])
    return story, approval
