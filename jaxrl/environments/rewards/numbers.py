r"""Numbers in answers as models write them: signs, separators, fractions, units, \boxed{...}.

Numbers are exact. A text that is not plainly a number has none; it is never read as another number.
"""

import re
from fractions import Fraction

_LONGEST = 1000  # characters of a number with its unit
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escape, such as of a brace
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_POWER = r"10\s*\^\s*(?:\{\s*(-?\d{1,3})\s*\}|(\d)(?!\d))"
# Notations that mean the same, in order: each pattern is replaced by its text.
_SAME = [
    (re.compile(pattern), text)
    for pattern, text in (
        ("[\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\uff0d]", "-"),
        (r"\{,\}", ","),
        (r"\\!|\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
        # A narrow space between groups of digits separates thousands.
        (r"(?<=\d)(?:[\u00a0\u2007-\u200a\u202f]|\\[,;: ]|~)(?=\d{3}(?!\d))", ","),
        (r"[\u00a0\u2007-\u200a\u202f~]|\\[,;: ]|\\quad(?![a-zA-Z])", " "),
        (r"\\([$%])", r"\1"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\N{DEGREE SIGN}|\\degree(?![a-zA-Z])", " units "),
        (r"\\(?:text[a-z]*|mbox)\s*\{\s*[^{}\s\d]\s*\}", " units "),
        (r"\\(?:text[a-z]*|mbox|math[a-z]*)\s*\{([^{}]*)\}", r" \1 "),
        (r"(?<=\d)(?=\\[dtc]?frac)", " "),
        (r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", r"\1\2/\3\4 "),
        (rf"(?<=\d)\s*(?:\\times|\\cdot|[x*×·])\s*{_POWER}", r"e\1\2"),
        (rf"(?<![\w.,]){_POWER}", r"1e\1\2"),
    )
]
_NUMBER = re.compile(
    rf"(?:[$€£¥]\s*)?(?P<sign>[-+]\s*)?(?:[$€£¥]\s*)?(?:(?P<whole>\d+)\s+(?=\d+\s*/\s*\d+))?"
    rf"(?P<above>-?{_DECIMAL}(?:[eE][-+]?\d{{1,3}})?)(?:\s*/\s*(?P<below>{_DECIMAL}))?"
)
_DELIMITED = re.compile(r"\s*(?:\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\{([^{}]*)\})\s*", re.DOTALL)
_NAME = re.compile(r"\s*\\?[A-Za-z]+\s*=(?=\s*\S)")  # "x = 5" is 5
# Words are units, except those that change the number. One or two letters may be variables.
_UNIT = re.compile(
    r"\s*(?:[%€£¥$]|(?:(?:[cmk]m|k?mg|kg|m[lL]|km/h|m/s|hr|ft|in|oz|lbs?|of|[ap]m|\b[A-Za-z]{3,})"
    r"(?:\s*\^\s*\{?[23]\}?)?\s*)+)\.?\s*"
)
_CHANGES = re.compile(
    r"\b(?:dozen|hundred|thousand|[mbtr]+illion|half|halve|third|quarter|fourth|fifth|sixth|seventh"
    r"|eighth|ninth|tenth|hundredth|thousandth|pi|sin|cos|tan|log|ln|exp|sqrt|mod)s?\b"
)
# A token may have digits behind separators, as 1:30 and 4,5 do: these are no numbers.
_DIGITS = r"(?:\d+(?:[.,:]\d+)*|\.\d+)(?:[eE][-+]?\d+)?"
_TOKEN = re.compile(
    rf"(?:(?<![\w.])-)?[$€£¥]?(?<![\w.])(?:\d+ +(?=\d+/\d))?{_DIGITS}(?:\s*/\s*{_DIGITS})*"
)
# At the end of a text without white space there. Each space has one place in it: with two, a long
# run of them would take minutes.
_INSIDE = re.compile(r"(?:[\^_/](?:\s*\{)?|\\(?:sqrt|frac)(?:\s*\[\d+\])?(?:\s*\{)?|\}\s*\{)$")
_GOES_ON = re.compile(r"\s*(?:[\^_]|\\(?:sqrt|pi)(?![a-zA-Z]))")


def final_number(text: str) -> Fraction | None:
    """Returns the final number of a text, as `numeric_match` defines it; None without a number."""
    if "####" in text:
        line = (text.rpartition("####")[2].strip().splitlines() or [""])[0]
        whole = plain_number(line)
        return _number_in(line, 0) if whole is None else whole
    if _BOX.search(text):
        found = boxes(text)
        return plain_number(found[-1]) if found else None
    return _number_in(text, -1)


def reference_number(text: str) -> Fraction | None:
    """Returns the number of a reference answer: of what it marks, as `final_number`, else of the
    whole text, or of a sentence with one number. Returns None for any other text."""
    if "####" in text or _BOX.search(text):
        return final_number(text)
    whole = plain_number(text)
    if whole is not None or re.search(r"[\\^_=+*(){}<>|]", text) or _CHANGES.search(text.lower()):
        return whole
    return final_number(text) if len(_TOKEN.findall(_same(text))) == 1 else None


def plain_number(text: str) -> Fraction | None:
    """Reads a text that is a number, and apart from it only a unit or `x =`; else returns None. A
    percent sign is a unit."""
    if len(text) > _LONGEST:
        return None
    while delimited := _DELIMITED.fullmatch(text):
        text = delimited[delimited.lastindex or 0]
    text = _NAME.sub("", _same(text), count=1).strip()
    number = _NUMBER.match(text)
    if number is None or _CHANGES.search(text.lower()):
        return None
    rest = text[number.end() :]
    return _value(number) if rest in ("", ".") or _UNIT.fullmatch(rest) else None


def bare_number(text: str) -> Fraction | None:
    """Reads a text that is a number, perhaps with a currency; else returns None."""
    number = _NUMBER.fullmatch(_same(text).strip()) if len(text) <= _LONGEST else None
    return _value(number) if number else None


def boxes(text: str) -> list[str]:
    r"""Returns the contents of each \boxed{...} with its braces balanced, or an empty list if the
    last one is not closed."""
    found = list[str]()
    for box in _BOX.finditer(text):
        depth = 1
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                found.append(text[box.end() : brace.start()])
                break
        else:
            return []
    return found


def _same(text: str) -> str:
    for pattern, other in _SAME:
        text = pattern.sub(other, text)
    return text


def _number_in(text: str, place: int) -> Fraction | None:
    """Reads the number at a place among those of a text; None if it is a part of an expression."""
    text = _same(text)
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return None
    one = tokens[place]
    if _INSIDE.search(text[: one.start()].rstrip()) or _GOES_ON.match(text, one.end()):
        return None
    return bare_number(one[0])


def _value(number: re.Match[str]) -> Fraction | None:
    above, below = (_fraction(number[name] or "1") for name in ("above", "below"))
    if not below or (number["whole"] and not 0 < above < below):
        return None  # in 3 1/2 the fraction is less than 1
    value = int(number["whole"] or 0) + above / below
    return -value if "-" in (number["sign"] or "") else value


def _fraction(decimal: str) -> Fraction:
    return Fraction(re.sub("[, ]", "", decimal))
