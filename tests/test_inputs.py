"""What can be typed, and what cannot: nothing that a column, a checkpoint or a person could misread gets in."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flow.errors import BadInput
from flow.inputs import (
    MAX_NAME,
    MAX_NOTE,
    decimals_of,
    parse_amount,
    parse_claim,
    parse_interrupt_id,
    parse_text,
    parse_thread_id,
)

DECIMALS = {"USD": 2, "EUR": 2, "JPY": 0, "KRW": 0, "KWD": 3, "BHD": 3, "CLP": 0}


@pytest.mark.parametrize(
    ("text", "currency", "expected"),
    [
        ("250", "USD", "250.00"),
        ("250.5", "USD", "250.50"),
        ("250.00", "USD", "250.00"),
        ("0.01", "USD", "0.01"),
        ("007", "USD", "7.00"),
        ("250", "JPY", "250"),
        ("1.234", "KWD", "1.234"),
        ("1", "KWD", "1.000"),
        ("999999999999999.99", "USD", "999999999999999.99"),
    ],
)
def test_an_amount_has_exactly_its_currencys_decimals(text: str, currency: str, expected: str) -> None:
    claim = parse_claim(amount=text, currency=currency)
    assert str(claim.amount) == claim.as_input()["amount"] == expected


@pytest.mark.parametrize(
    ("text", "currency"),
    [
        ("NaN", "USD"),
        ("sNaN", "USD"),
        ("Infinity", "USD"),
        ("-inf", "USD"),
        ("-5", "USD"),
        ("+5", "USD"),
        ("0", "USD"),
        ("0.00", "USD"),
        ("000000000000000", "JPY"),
        ("1e400", "USD"),
        ("1E2", "USD"),
        ("12.345", "USD"),
        ("12.340", "USD"),
        ("0.001", "USD"),
        ("1,000", "USD"),
        ("1_000", "USD"),
        ("1.000,00", "EUR"),
        (" 5", "USD"),
        ("5 ", "USD"),
        ("5\n", "USD"),
        ("5\x00", "USD"),
        ("", "USD"),
        (".", "USD"),
        (".5", "USD"),
        ("5.", "USD"),
        ("1.2.3", "USD"),
        ("0x10", "USD"),
        ("$5", "USD"),
        ("\uff12\uff15\uff10", "USD"),  # full-width 250
        ("\u0662\u0665\u0660", "USD"),  # Arabic-Indic 250
        ("\u0968\u096b\u0966", "USD"),  # Devanagari 250
        ("5\u00b2", "USD"),  # 5 squared
        ("\u22125", "USD"),  # a minus sign that is no hyphen
        ("5\u200b", "USD"),
        ("\ud800", "USD"),
        ("1000000000000000", "USD"),
        ("0000000000000001", "USD"),
        ("9" * 5000, "USD"),
        ("0." + "0" * 5000 + "1", "USD"),
        ("1.5", "JPY"),
        ("1.0", "JPY"),
        ("1.2345", "KWD"),
    ],
)
def test_an_amount_that_could_be_misread_is_refused(text: str, currency: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_amount(text, currency, decimals_of(currency))
    assert (refused.value.name, refused.value.value, refused.value.exit_code) == ("amount", text, 2)
    assert str(refused.value).startswith("amount ")
    assert str(refused.value).isascii()
    assert len(str(refused.value)) < 200


@given(
    text=st.one_of(
        st.from_regex(r"[0-9]{1,16}(\.[0-9]{0,4})?", fullmatch=True),
        st.decimals(allow_nan=True, allow_infinity=True).map(str),
        st.text(max_size=20),
    ),
    currency=st.sampled_from(sorted(DECIMALS)),
)
def test_an_accepted_amount_is_positive_exact_and_round_trips(text: str, currency: str) -> None:
    decimals = decimals_of(currency)
    try:
        amount = parse_amount(text, currency, decimals)
    except BadInput:
        return
    assert amount > 0
    assert amount == Decimal(text)
    assert -int(amount.as_tuple().exponent) == decimals
    assert str(parse_amount(str(amount), currency, decimals)) == str(amount)


@given(digits=st.integers(1, 10**15 - 1), currency=st.sampled_from(sorted(DECIMALS)))
def test_every_whole_amount_up_to_fifteen_digits_is_accepted(digits: int, currency: str) -> None:
    assert parse_amount(str(digits), currency, decimals_of(currency)) == digits


@pytest.mark.parametrize(("currency", "decimals"), DECIMALS.items())
def test_a_currency_has_the_decimals_of_iso_4217(currency: str, decimals: int) -> None:
    assert decimals_of(currency) == decimals


@pytest.mark.parametrize(
    "currency",
    ["", "usd", "Usd", "US", "USDT", "USD ", "ZZZ", "XXX", "XAU", "XTS", "DEM", "BTC", "$", "\uff35SD", "USD\x00"],
)
def test_a_currency_that_is_no_legal_tender_today_is_refused(currency: str) -> None:
    with pytest.raises(BadInput, match=r"currency .* ISO 4217"):
        parse_claim(amount="5", currency=currency)


@pytest.mark.parametrize("thread_id", ["t1", "0", "A", "claim:2026-11.30_x@acme", "a" * 200])
def test_a_thread_id_is_kept_as_it_is(thread_id: str) -> None:
    assert parse_thread_id(thread_id) == thread_id


@pytest.mark.parametrize(
    "thread_id",
    [
        *(
            "",
            " ",
            "t 1",
            "t1 ",
            "t1\n",
            "\nt1",
            "-t1",
            ".t1",
            ".",
            "..",
            "_t",
            ":t",
            "@t",
            "t/1",
            "t\\1",
            "t?1",
            "t#1",
        ),
        *(
            "t%31",
            "t1\x00",
            "t\ud8001",
            "\u0442est",
            "t\uff11",
            "\u00e9",
            "t\u200b1",
            "a" * 201,
            "<t>",
            "t'1",
            't"1',
            "t;1",
        ),
    ],
)
def test_a_thread_id_that_would_not_survive_a_url_is_refused(thread_id: str) -> None:
    with pytest.raises(BadInput, match=r"\Athread id ") as refused:
        parse_thread_id(thread_id)
    assert str(refused.value).isascii()


def test_an_interrupt_id_is_32_lower_case_hexadecimal_digits() -> None:
    assert parse_interrupt_id("0123456789abcdef" * 2) == "0123456789abcdef" * 2
    for wrong in ("", "0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 32 + "\n", "\uff10" * 32, "\u0660" * 32):
        with pytest.raises(BadInput, match=r"\Ainterrupt id "):
            parse_interrupt_id(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "three chairs",
        "two\nlines\tand a tab",
        "\u0141\u00f3d\u017a \U0001f600 \u0645\u0631",
        "a\u202eb",
        "x" * MAX_NOTE,
    ],
)
def test_text_is_kept_unchanged(text: str) -> None:
    assert parse_claim(amount="5", currency="USD", note=text).note == text


@pytest.mark.parametrize("bad", ["\x00", "\x01", "\x07", "\x08", "\x0b", "\x0c", "\x1b", "\x7f", "\ud800", "\udfff"])
@pytest.mark.parametrize("field", ["payee", "note"])
def test_text_that_a_checkpoint_cannot_hold_is_refused(bad: str, field: str) -> None:
    with pytest.raises(BadInput, match=rf"\A{field} .*cannot be stored") as refused:
        parse_claim(amount="5", currency="USD", **{field: f"chairs{bad}"})
    assert str(refused.value).isascii()


@pytest.mark.parametrize(("name", "longest"), [("payee", MAX_NAME), ("note", MAX_NOTE)])
def test_text_that_is_too_long_is_refused_with_its_length(name: str, longest: int) -> None:
    assert parse_claim(amount="5", currency="USD", **{name: "x" * longest})
    with pytest.raises(BadInput, match=rf"{name} .*it has {longest + 1} characters, at most {longest}"):
        parse_claim(amount="5", currency="USD", **{name: "x" * (longest + 1)})


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_payee_is_one_line(end: str) -> None:
    with pytest.raises(BadInput, match=r"payee .* one line"):
        parse_claim(amount="5", currency="USD", payee=f"ACME{end}approved by Bob")


@given(text=st.text(max_size=40))
def test_accepted_text_can_be_stored_as_utf8_without_nul(text: str) -> None:
    try:
        assert parse_text("note", text, 40) == text
    except BadInput:
        return
    assert b"\0" not in text.encode()


def test_the_first_field_that_is_wrong_is_named() -> None:
    with pytest.raises(BadInput, match=r"\Acurrency 'usd' is not usable"):
        parse_claim(amount="-5", currency="usd", payee="\x00")
