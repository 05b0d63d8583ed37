r"""Numbers as models write them: of a box, after ####, in a text and in a reference answer."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from jaxrl.environments.rewards.builtin import boxed_format, hash_format, math_verify, numeric_match
from jaxrl.environments.rewards.numbers import final_number

# The content of a box, and a reference answer. An independent judge (math-verify) says the same.
EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", ".5"),
    (r"\frac12", "1/2"),
    (r"-\frac{3}{4}", "-0.75"),
    (r"\frac{-3}{4}", "-0.75"),
    (r"3\frac12", "3.5"),
    (r"-3\frac{1}{2}", "-3.5"),
    (r"\frac{1}{3}", r"\frac{2}{6}"),
    ("3/4", "0.75"),
    ("-7", "-7"),
    ("\N{MINUS SIGN}7", "-7"),
    ("- 7", "-7"),
    ("+7", "7"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1,\!234", "1234"),
    ("1,234,567.89", "1234567.89"),
    (r"\$5", "5"),
    (r"\$1,234.50", "1234.5"),
    (r"50\%", "50"),
    ("50%", r"50\%"),
    (r"5\text{ cm}", "5"),
    (r"5\,\text{m}^2", "5"),
    ("5 cm", "5"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"\mathbf{7}", "7"),
    (r"\text{12}", "12"),
    ("x = 5", "5"),
    (".5", "0.5"),
    ("10^{3}", "1000"),
    (r"2 \times 10^3", "2000"),
    (r"1.5 \cdot 10^{-2}", "0.015"),
    (r"\boxed{5}", "5"),
]
# math-verify 0.9 reads `1 234` as 1 + 234, `5.` as a text and 1.5e3 as 1.5 * e * 3.
EQUAL_HERE = [
    ("1 234", "1234"),
    (r"1\,234", "1234"),
    ("1\N{THIN SPACE}234", "1234"),
    ("1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567", "1234567"),
    ("5.", "5"),
    ("1.5e3", "1500"),
    ("-$5", "-5"),
    ("$5$", "5"),
    ("{5}", "5"),
]
# These are never the number, nor another one.
NO_NUMBER = [
    *(r"2\sqrt{3}", r"\sqrt{3}", r"5\pi", r"\frac{\pi}{2}", "5x", "5i", "x^2", "2^{10}", "101_2"),
    *("1,2", "(1, 234)", r"\{1,2\}", "12,34", "0,5", "1,2345", "1.234.567", "5:30", "3 : 4"),
    *(r"5 \text{ or } 6", r"5\text{ million}", r"\text{A}", "", "5!", r"\pm 5", r"\frac{1}{0}"),
    *("3 5/2", "1/2/3", "x = 3, y = 4", r"\infty", "1e400000", r"\frac{\frac12}{3}"),
]


@pytest.mark.parametrize(("content", "reference"), EQUAL + EQUAL_HERE)
def test_a_box_is_read_as_written(content, reference):
    completion = rf"so 9 of them, that is \boxed{{{content}}}."
    assert numeric_match(completion, {"answer": reference}) == 1
    assert numeric_match(completion, {"answer": "98765"}) == 0
    assert numeric_match(rf"\boxed{{{reference}}}", {"answer": rf"\boxed{{{content}}}"}) == 1
    assert boxed_format(completion, {}) == (r"\boxed" not in content)


@pytest.mark.parametrize(("content", "reference"), EQUAL)
def test_math_verify_agrees(content, reference):
    pytest.importorskip("math_verify")
    assert math_verify(rf"so \boxed{{{content}}}.", {"answer": reference}) == 1


@pytest.mark.parametrize("content", NO_NUMBER)
def test_a_box_without_a_plain_number_has_none(content):
    assert final_number(rf"so 9 of them, that is \boxed{{{content}}}.") is None
    with pytest.raises(ValueError, match="is not a number"):
        numeric_match("9", {"answer": rf"so 9: \boxed{{{content}}}"})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### \N{MINUS SIGN}5", "-5"),
        ("#### $1,234.50", "1234.5"),
        ("#### 1 234", "1234"),
        (r"#### \frac{1}{2}", "1/2"),
        ("#### 5 apples\n7", "5"),
        ("It is 1/2.", "1/2"),
        ("It is 3 1/2.", "7/2"),
        ("It is 3.", "3"),
        ("**\N{MINUS SIGN}3**", "-3"),
        ("5 - 3 = 2", "2"),
        ("5 - 3", "3"),
        (r"$x = \frac{3}{4}$", "3/4"),
        ("about 2.5 \N{MULTIPLICATION SIGN} 10^4", "25000"),
        ('{"answer": 5}', "5"),
        (r"\boxed{\frac{1}{2}} and then \boxed{3}", "3"),
        ("#### 12,34", None),
        ("12 or 12,34", None),
        ("12 at 5:30", None),
        ("12 and 1.2.3", None),
        (r"3, so $2\sqrt{3}$", None),
        (r"3, so $\frac{\pi}{2}$", None),
        (r"3, so $\frac{\sqrt{3}}{2}$", None),
        (r"3, so $2\pi$", None),
        ("3, so 2^10", None),
        (r"3, so \boxed{7", None),
        (r"\boxed{3} so \boxed{7", None),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize("text", ["we get $42$", "42 apples", "$42$", r"\(42\)", "It is 42."])
def test_references_of_one_number(text):
    assert numeric_match("42", {"answer": text}) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("x^2 + 42", "(1, 42)", "between 1 and 42", "41,42", "2 and a half", "5-3", "1 = 42", ""),
        *(r"42\sqrt{3}", "no 42 million", "42:00", r"\{42\}"),
    ],
)
def test_a_reference_that_is_no_number_is_an_error(text):
    with pytest.raises(ValueError, match=r"is not a number.*use the reward math_verify"):
        numeric_match("42", {"answer": text})


@given(st.fractions(-1000, 1000), st.sampled_from(["", r"\text{ m}", " dollars"]))
def test_every_fraction_is_read(number, unit):
    above, below = number.numerator, number.denominator
    sign, above = ("\N{MINUS SIGN}", -above) if above < 0 else ("", above)
    for written in (rf"{sign}\frac{{{above}}}{{{below}}}", f"{sign}{above}/{below}"):
        assert final_number(rf"1 \boxed{{{written}{unit}}}") == number
        assert final_number(f"1 so {written}") == number


def test_formats_count_nested_braces():
    assert boxed_format(r"\boxed{\frac{1}{2}}", {}) == 1
    assert boxed_format(r"\boxed{\frac{1}{2}} \boxed{2}", {}) == 0
    assert boxed_format(r"\boxed{\frac{1}{2}", {}) == 0
    assert hash_format("#### \N{MINUS SIGN}1/2", {}) == 1
    assert hash_format("#### 1 apple", {}) == 0


@given(
    st.text(alphabet="0123456789.,:/-+$%^_{} \\\nexm#\N{MINUS SIGN}", max_size=60), st.booleans()
)
def test_no_text_is_an_error(text, boxed):
    number = final_number(rf"\boxed{{{text}}}" if boxed else text)
    assert number is None or abs(number) >= 0


@pytest.mark.parametrize(
    "piece", ["1", "1,", " ", "1 ", "m", "km ", "{", r"\boxed{", r"\frac{1}", "a", "}{", "-", "1/"]
)
def test_a_long_text_takes_no_time(piece):
    start = time.process_time()
    long = piece * 20_000
    for text in (f"7 {long}", rf"\boxed{{7 {long}!}}", f"^{long}x 7", rf"\sqrt{long}x 7"):
        final_number(text)
    assert time.process_time() - start < 2
