"""Requests as Slack would send them, and as it never would: signed, unsigned, stale and malformed.

Pure functions and one table; sending is the test's business. What a request is: `MALFORMED` lists each with the
statuses that are a right answer to it. The common rule: nothing unverified is looked at, nothing verified is a 500.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote_plus

SIGNING_SECRET = "test-signing-secret"

FORM = "application/x-www-form-urlencoded"
JSON = "application/json"

# Not Slack's: 401, before anything in it is looked at.
UNVERIFIED = range(401, 402)
# Slack's, or too large or misdirected to tell, and unusable: the caller's mistake.
REFUSED = range(400, 500)
# Slack's, and unusual: whether it is acknowledged or refused is the bot's choice, failing is not.
ANSWERED = range(200, 500)

# As an override of `block_actions_body`: leave this field out.
ABSENT = object()


def sign(secret: str, timestamp: int | str, body: bytes) -> dict[str, str]:
    """The two headers of a request from Slack; the timestamp is Unix seconds, good for five minutes either way."""
    return {"X-Slack-Request-Timestamp": str(timestamp), "X-Slack-Signature": signature_of(secret, timestamp, body)}


def signature_of(secret: str, timestamp: int | str, body: bytes) -> str:
    """`v0=` and the HMAC-SHA256 of `v0:timestamp:body` in hexadecimal (docs.slack.dev, "Verifying requests")."""
    mac = hmac.new(secret.encode(), b"v0:%s:%s" % (str(timestamp).encode(), body), hashlib.sha256)
    return "v0=" + mac.hexdigest()


def block_actions_body(
    *,
    user: str = "U01ALICE",
    team: str = "T01TEST",
    action_id: str = "approve",
    value: object = "v1",
    channel: str = "C01GEN",
    message_ts: str = "1.1",
    # Nobody listens on port 9.
    response_url: str = "http://127.0.0.1:9/none",
    **overrides: object,
) -> bytes:
    """The form body of one click on a button of a message.

    `overrides` replace whole fields of the payload, `ABSENT` leaves one out. For a user, team or channel that is no
    such thing at all, see `altered_click_body`.
    """
    payload: dict[str, object] = {
        "type": "block_actions",
        "api_app_id": "A01APP",
        "token": "verification-token",
        "team": {"id": team, "domain": "test-workspace"},
        "enterprise": None,
        "is_enterprise_install": False,
        "user": {"id": user, "username": user.lower(), "name": user.lower(), "team_id": team},
        "container": {"type": "message", "message_ts": message_ts, "channel_id": channel, "is_ephemeral": False},
        "trigger_id": "1.2.a",
        "channel": {"id": channel, "name": "approvals"},
        "message": {"type": "message", "ts": message_ts, "user": "U0BOT", "text": "x", "blocks": []},
        "state": {"values": {}},
        "response_url": response_url,
        "actions": [button(action_id, value)],
    }
    return _body_of({**payload, **overrides})


def altered_click_body(**fields: object) -> bytes:
    """The same click with whole fields of its payload replaced, whatever they are; `ABSENT` leaves one out."""
    form = parse_qs(block_actions_body().decode())
    return _body_of({**json.loads(form["payload"][0]), **fields})


def _body_of(payload: dict[str, object]) -> bytes:
    return payload_body({name: each for name, each in payload.items() if each is not ABSENT})


def button(action_id: str, value: object) -> dict[str, Any]:
    """The element of `actions` that says which button was clicked."""
    text = {"type": "plain_text", "text": "A", "emoji": True}
    action = {"type": "button", "action_id": action_id, "block_id": "a1", "text": text, "action_ts": "1.1"}
    return {**action, "value": value}


def payload_body(payload: object) -> bytes:
    """An interactive payload as the form body that Slack posts."""
    return raw_payload_body(json.dumps(payload))


def raw_payload_body(text: str) -> bytes:
    """The same around a payload that need not be JSON."""
    return f"payload={quote_plus(text)}".encode()


def _signed(secret: str, now: int, body: bytes) -> dict[str, str]:
    return sign(secret, now, body)


def _unsigned(secret: str, now: int, body: bytes) -> dict[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class SlackRequest:
    """One request that the bot must survive, and the statuses that are a right answer to it.

    Headers depend on the time, so they are made when it is sent.
    """

    name: str
    body: bytes
    expected: range
    content_type: str | None = FORM
    signing: Callable[[str, int, bytes], dict[str, str]] = _signed
    extra_headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    path: str = "/slack/events"

    def headers(self, now: float, secret: str = SIGNING_SECRET) -> dict[str, str]:
        """All headers to send. aiohttp adds a Content-Type where there is none, unless told to skip it."""
        content_type = {} if self.content_type is None else {"Content-Type": self.content_type}
        return {**content_type, **self.signing(secret, int(now), self.body), **self.extra_headers}

    def __str__(self) -> str:
        return self.name


def _at(shift_s: int) -> Callable[[str, int, bytes], dict[str, str]]:
    """Signed rightly, by a clock that is this far ahead."""
    return lambda secret, now, body: sign(secret, now + shift_s, body)


def _with_timestamp(text: str) -> Callable[[str, int, bytes], dict[str, str]]:
    """Signed rightly, over a timestamp that is none."""
    return lambda secret, now, body: sign(secret, text, body)


def _with_signature(change: Callable[[str], str]) -> Callable[[str, int, bytes], dict[str, str]]:
    """Signed now, with the signature changed."""
    return lambda secret, now, body: {
        **sign(secret, now, body),
        "X-Slack-Signature": change(signature_of(secret, now, body)),
    }


def _without(header: str) -> Callable[[str, int, bytes], dict[str, str]]:
    """Signed now, with one of the two headers left out."""
    return lambda secret, now, body: {name: each for name, each in sign(secret, now, body).items() if name != header}


def _spaced(secret: str, now: int, body: bytes) -> dict[str, str]:
    # HTTP takes the spaces off a header's ends, so what arrives is not what was signed.
    return sign(secret, f" {now} ", body)


def _by_another_secret(secret: str, now: int, body: bytes) -> dict[str, str]:
    return sign(f"{secret}-old", now, body)


def _of_another_body(secret: str, now: int, body: bytes) -> dict[str, str]:
    return sign(secret, now, body + b"&x=1")


_CLICK = block_actions_body()
# An action that no bot listens for: what becomes of it shows how the request was read, and nothing is decided.
_STRANGE_CLICK = block_actions_body(action_id="no_such_action")
_URL_VERIFICATION = b'{"type":"url_verification","challenge":"c"}'
_LEGACY_BUTTON = {
    "type": "interactive_message",
    "callback_id": "x",
    "actions": [{"name": "a", "type": "button", "value": "1"}],
    "team": {"id": "T01TEST"},
    "user": {"id": "U01ALICE"},
    "channel": {"id": "C01GEN"},
}
_EMPTY_FORM = {"type": "view_submission", "view": {"callback_id": "change"}, "user": {"id": "U01ALICE"}}
_HOME_CLICK = altered_click_body(
    actions=[button("no_such_action", "v1")],
    channel=ABSENT,
    message=ABSENT,
    container={"type": "view", "view_id": "V1"},
    view={"id": "V1", "type": "home", "team_id": "T01TEST"},
    response_url=ABSENT,
)


def _unsigned_requests() -> list[SlackRequest]:
    cases: list[tuple[str, bytes, str | None]] = [
        ("click", _CLICK, FORM),
        ("json that is none", b"{bad", JSON),
        ("bytes that are not utf-8", b"\xff\xfe=1", FORM),
        ("json list", b"[1]", JSON),
        ("json null", b"null", JSON),
        ("payload that is not json", b"payload=zzz", FORM),
        ("payload null", b"payload=null", FORM),
        ("payload list", b"payload=[]", FORM),
        ("payload nested deeply", raw_payload_body("[" * 100_000), FORM),
        ("unknown charset", b"a=1", f"{JSON}; charset=foo"),
        ("ssl_check", b"ssl_check=1&token=x", FORM),
        ("ssl_check as json", b'{"ssl_check":"1"}', JSON),
        ("url_verification", _URL_VERIFICATION, JSON),
        ("empty body", b"", FORM),
        ("no content type", _CLICK, None),
    ]
    return [
        SlackRequest(name=f"unsigned: {name}", body=body, content_type=kind, signing=_unsigned, expected=UNVERIFIED)
        for name, body, kind in cases
    ]


def _wrongly_signed_requests() -> list[SlackRequest]:
    cases: list[tuple[str, Callable[[str, int, bytes], dict[str, str]]]] = [
        ("no timestamp", _without("X-Slack-Request-Timestamp")),
        ("no signature", _without("X-Slack-Signature")),
        ("timestamp is a word", _with_timestamp("abc")),
        ("timestamp is empty", _with_timestamp("")),
        ("timestamp is zero", _with_timestamp("0")),
        ("timestamp is negative", _with_timestamp("-1")),
        ("timestamp is a fraction", lambda secret, now, body: sign(secret, f"{now}.5", body)),
        ("timestamp in Arabic digits", lambda secret, now, body: sign(secret, _arabic(now), body)),
        # int() refuses more than 4,300 digits with an error of its own.
        ("timestamp of 5,000 digits", _with_timestamp("9" * 5_000)),
        ("timestamp not a number, nan", _with_timestamp("nan")),
        ("timestamp with spaces", _spaced),
        ("six minutes old", _at(-361)),
        ("six minutes ahead", _at(361)),
        ("a year old", _at(-365 * 86_400)),
        ("signature not ascii", _with_signature(lambda right: "v0=é")),
        ("signature empty", _with_signature(lambda right: "")),
        ("signature cut short", _with_signature(lambda right: right[:-1])),
        ("signature of another version", _with_signature(lambda right: right.replace("v0=", "v1="))),
        ("signature without its version", _with_signature(lambda right: right.removeprefix("v0="))),
        ("signature by another secret", _by_another_secret),
        ("signature of another body", _of_another_body),
    ]
    return [
        SlackRequest(name=f"wrongly signed: {name}", body=_CLICK, signing=signing, expected=UNVERIFIED)
        for name, signing in cases
    ]


def _arabic(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩"))


def _signed_requests_without_sense() -> list[SlackRequest]:
    cases: list[tuple[str, bytes, str | None]] = [
        ("empty body", b"", FORM),
        ("json that is none", b"{bad", JSON),
        ("json cut short", b'{"type":"event_callback","event":{', JSON),
        ("json list", b"[1]", JSON),
        ("json null", b"null", JSON),
        ("json object that says nothing", b"{}", JSON),
        ("bytes that are not utf-8", b"\xff\xfe=1", FORM),
        ("json that is not utf-8", b'{"type":"\xff"}', JSON),
        ("unknown charset", b'{"type":"x"}', f"{JSON}; charset=foo"),
        ("multipart", b"--x--", "multipart/form-data; boundary=x"),
        ("form without a payload", b"a=1", FORM),
        ("payload empty", b"payload=", FORM),
        ("payload that is not json", b"payload=zzz", FORM),
        ("payload null", b"payload=null", FORM),
        ("payload list", b"payload=[]", FORM),
        ("payload number", b"payload=1", FORM),
        ("payload string", b"payload=%22x%22", FORM),
        ("payload object that says nothing", b"payload={}", FORM),
        ("payload not utf-8", b"payload=%ff%fe", FORM),
        # The parser gives up on depth with RecursionError, on digits with ValueError: neither is a JSONDecodeError.
        ("payload nested deeply", raw_payload_body("[" * 100_000), FORM),
        ("payload with 5,000 digits", raw_payload_body('{"type":' + "9" * 5_000 + "}"), FORM),
        ("payload of an unknown type", payload_body({"type": "no_such_type"}), FORM),
        ("payload whose type is a list", payload_body({"type": ["block_actions"]}), FORM),
        ("command without a user", b"command=%2Fclaim&text=1", FORM),
        ("event without its event", b'{"type":"event_callback","team_id":"T01TEST"}', JSON),
        ("modal submission without its view", payload_body({"type": "view_submission"}), FORM),
        ("modal submission of a form that says nothing", payload_body(_EMPTY_FORM), FORM),
        ("legacy message button", payload_body(_LEGACY_BUTTON), FORM),
    ]
    return [
        SlackRequest(name=f"signed: {name}", body=body, content_type=kind, expected=REFUSED)
        for name, body, kind in cases
    ]


def _signed_clicks_without_sense() -> list[SlackRequest]:
    cases: list[tuple[str, bytes]] = [
        ("no actions", block_actions_body(actions=ABSENT)),
        ("actions empty", block_actions_body(actions=[])),
        ("actions null", block_actions_body(actions=None)),
        ("actions is an object", block_actions_body(actions={"0": button("approve", "v1")})),
        ("action is a word", block_actions_body(actions=["approve"])),
        ("action without an id", block_actions_body(actions=[{"type": "button", "value": "v1"}])),
        ("action with a list as its id", block_actions_body(actions=[{**button("approve", "v1"), "action_id": []}])),
        ("no user", altered_click_body(user=ABSENT)),
        ("user null", altered_click_body(user=None)),
        ("user is a word", altered_click_body(user="U01ALICE")),
        ("user without an id", altered_click_body(user={"name": "alice"})),
        ("user with a number as id", altered_click_body(user={"id": 1, "team_id": "T01TEST"})),
        ("team is a word", altered_click_body(team="T01TEST")),
        ("no value", block_actions_body(actions=[{"type": "button", "action_id": "approve", "block_id": "a1"}])),
        ("value null", block_actions_body(value=None)),
        ("value is a number", block_actions_body(value=1)),
        ("value is an object", block_actions_body(value={"interrupt_id": "x"})),
    ]
    return [SlackRequest(name=f"signed click: {name}", body=body, expected=REFUSED) for name, body in cases]


def _signed_clicks_that_are_odd() -> list[SlackRequest]:
    cases: list[tuple[str, bytes]] = [
        ("on App Home, no channel", _HOME_CLICK),
        ("organisation-wide install, no team", _organisation_click()),
        ("action that nobody listens for", _STRANGE_CLICK),
        ("by nobody in the workspace", block_actions_body(user="U00NOBODY")),
        ("from another workspace", block_actions_body(team="T99OTHER")),
        ("value that was never sent", block_actions_body(value="no such request")),
        ("value empty", block_actions_body(value="")),
        ("value with NUL", block_actions_body(value="a\x00b")),
        ("value with half a character", block_actions_body(value="\ud83d")),
        ("value of 100,000 characters", block_actions_body(value="x" * 100_000)),
        ("message that is gone", block_actions_body(message=ABSENT)),
        ("no response_url", altered_click_body(response_url=ABSENT)),
        ("two actions at once", block_actions_body(actions=[button("approve", "v1"), button("reject", "v1")])),
        ("fields that nobody knows", block_actions_body(new_field={"a": [1]})),
    ]
    return [SlackRequest(name=f"signed click: {name}", body=body, expected=ANSWERED) for name, body in cases]


def _organisation_click() -> bytes:
    enterprise = {"id": "E1", "name": "x"}
    return altered_click_body(
        team=None,
        enterprise=enterprise,
        is_enterprise_install=True,
        actions=[button("no_such_action", "v1")],
    )


def _requests_of_other_shapes() -> list[SlackRequest]:
    return [
        SlackRequest(name="signed: two MiB", body=b"a" * (2 << 20), expected=REFUSED),
        SlackRequest(name="signed: GET", body=b"", method="GET", expected=REFUSED),
        SlackRequest(name="signed: another path", body=_CLICK, path="/slack/other", expected=REFUSED),
        SlackRequest(
            name="signed: says gzip, is not", body=_CLICK, extra_headers={"Content-Encoding": "gzip"}, expected=REFUSED
        ),
        SlackRequest(
            # Bolt's own mark on what it sends to itself: from outside it must not choose how a click is run.
            name="signed: asks for lazy listeners only",
            body=_CLICK,
            extra_headers={"X-Slack-Bolt-Lazy-Only": "1"},
            expected=ANSWERED,
        ),
        SlackRequest(name="signed: url_verification", body=_URL_VERIFICATION, content_type=JSON, expected=ANSWERED),
        SlackRequest(name="signed: ssl_check", body=b"ssl_check=1&token=x", expected=ANSWERED),
        SlackRequest(name="signed: nearly five minutes old", body=_STRANGE_CLICK, signing=_at(-290), expected=ANSWERED),
    ]


# Every request that is not plainly right, by name; the names are unique, for use as test ids.
MALFORMED: list[SlackRequest] = [
    *_unsigned_requests(),
    *_wrongly_signed_requests(),
    *_signed_requests_without_sense(),
    *_signed_clicks_without_sense(),
    *_signed_clicks_that_are_odd(),
    *_requests_of_other_shapes(),
]
