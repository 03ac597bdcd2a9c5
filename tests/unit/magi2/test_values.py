"""Values are read as they are written, or not at all."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magi2.values import as_boolean, as_integer, as_number, shown

NOT_INTEGERS = [
    *(True, False, 10.0, float("nan"), float("inf"), None, [], [10], {}, b"10", Fraction(1, 2), Decimal(10)),
    *(
        "",
        " ",
        "10.0",
        "1e1",
        " 10",
        "10 ",
        "1_0",
        "0x10",
        "ten",
        "--1",
        "+",
        "\u0661\u0660",
        "\uff11",
        "9" * 65,
    ),
    "10\n",
]
NOT_NUMBERS = [
    *(True, None, [], {}, b"10", float("nan"), float("inf"), float("-inf"), 1j),
    *(
        "",
        " ",
        "nan",
        "inf",
        "Infinity",
        "1e",
        "e1",
        ".",
        "1,5",
        "1e9999",
        "1_0",
        " 1",
        "1\n",
        "\u0661",
        "1e\u0661",
    ),
]


@pytest.mark.parametrize(
    ("value", "want"), [(7, 7), ("7", 7), ("+7", 7), ("-7", -7), ("007", 7), (10**30, 10**30)]
)
def test_integer_is_read(value: object, want: int) -> None:
    assert as_integer(value) == want


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_what_is_no_integer_is_refused(value: object) -> None:
    assert as_integer(value) is None


@pytest.mark.parametrize(
    ("value", "want"),
    [
        *(
            (10, 10),
            (12.5, 12.5),
            (Fraction(25, 2), 12.5),
            ("10", 10),
            ("10.0", 10),
            ("1e1", 10),
            ("12.50", 12.5),
        ),
        *((".5", 0.5), ("5.", 5), ("-1.5E-1", Decimal("-0.15")), (10**400, 10**400)),
    ],
)
def test_number_is_read_exactly(value: object, want: object) -> None:
    assert as_number(value) == want


def test_number_next_to_a_round_one_is_not_rounded() -> None:
    assert as_number("10.0000000000000000000000001") != 10


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused(value: object) -> None:
    assert as_number(value) is None


@pytest.mark.parametrize(
    ("value", "want"),
    [
        *((True, True), (1, True), ("1", True), ("true", True), ("TRUE", True), ("Yes", True), ("on", True)),
        *((False, False), (0, False), ("0", False), ("false", False), ("no", False), ("OFF", False)),
    ],
)
def test_boolean_is_read(value: object, want: object) -> None:
    assert as_boolean(value) is want


@pytest.mark.parametrize(
    "value", [2, -1, 1.0, "", "2", "y", "truee", " true", None, [], [True], {}], ids=repr
)
def test_what_is_no_boolean_is_refused(value: object) -> None:
    assert as_boolean(value) is None


@given(st.one_of(st.text(), st.integers(), st.floats(), st.binary(), st.lists(st.integers()), st.none()))
def test_any_value_is_shown_short_printable_and_in_ascii(value: object) -> None:
    text = shown(value)
    assert len(text) <= 60
    assert text.isascii()
    assert text.isprintable()


def test_integer_of_too_many_digits_to_print_is_shown_by_its_size() -> None:
    assert shown(10**5000) == "an integer of 16610 bits"


def test_long_text_is_cut_where_it_is_shown() -> None:
    assert shown("x" * 1000) == "x" * 37 + "..."
