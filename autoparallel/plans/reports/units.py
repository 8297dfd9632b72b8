"""Numbers with units, as reports write them."""

from __future__ import annotations

import math

from autoparallel.errors import InputError

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9,
          "TB": 10**12}


def duration_str(seconds: float) -> str:
    """
    >>> duration_str(90.0), duration_str(11135.0), duration_str(1e6), duration_str(1e8)
    ('90 s', '3.09 h', '11.6 days', '1157 days')
    """
    for unit, length_s in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{_three(seconds / length_s)} {unit}"
    return seconds_str(seconds)


def seconds_str(seconds: float) -> str:
    """Seconds with three digits (or all before the point) and a unit; what is below 1 ns is rounding, and 0.

    >>> seconds_str(0.0123), seconds_str(4e-17)
    ('12.3 ms', '0 s')
    """
    if abs(seconds) < 1e-9:
        return "0 s"
    if seconds < 0:
        return f"-{seconds_str(-seconds)}"
    scale, unit = next(((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
                        if seconds >= scale), (1e-9, "ns"))
    return f"{_three(seconds / scale)} {unit}"


def bytes_of(text: str | None, option: str = "--memory-limit") -> float | None:
    """Bytes of text such as "70GiB" or "1TB", the value of an ``option``; None of None. Raises InputError."""
    if text is None:
        return None
    number = text.rstrip("BbIiKkMmGgTt ")
    unit = text[len(number):].strip().upper()
    try:
        return float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise InputError(f"cannot read {option} {text!r}: write for example 70GiB") from None


def bytes_str(count: float) -> str:
    """Bytes with three digits (or all before the point) and a binary unit.

    >>> bytes_str(1.25 * 2**30), bytes_str(1010 * 2**20)
    ('1.25 GiB', '1010 MiB')
    """
    if count < 0:
        return f"-{bytes_str(-count)}"
    for scale, unit in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if count >= scale:
            return f"{_three(count / scale)} {unit}"
    return f"{count:.0f} B"


def _three(number: float) -> str:
    """A number with three digits, or all those before the point."""
    return f"{number:.0f}" if number >= 999.5 else f"{number:.3g}"


def count_str(count: float) -> str:
    """A number with three digits, and commas: 8,610, 0.43.

    >>> count_str(8612.3), count_str(0.4321), count_str(1234567.0)
    ('8,610', '0.432', '1,230,000')
    """
    if count == 0 or not math.isfinite(count):
        return f"{count:g}"
    digits = 2 - math.floor(math.log10(abs(count)))
    return f"{round(count, digits):,.{max(0, digits)}f}"


def large_str(count: float) -> str:
    """A number with three digits and a letter: 8.03 B (billions of parameters), 1.2 M."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.3g}"


def percent_str(share: float) -> str:
    """A share in percent, with two digits below ten: 47 %, 3.5 %, 0.10 %; what is below 0.0001 % is 0.

    >>> percent_str(0.473), percent_str(0.0351), percent_str(0.0004), percent_str(1.7e-8)
    ('47 %', '3.5 %', '0.04 %', '0 %')
    """
    value = 100 * share
    if abs(value) < 9.99e-5:
        return "0 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %" if abs(value) >= 0.995 else f"{value:.2g} %"


def below_all_str(share: float) -> str:
    """A share in percent, as `percent_str`, with digits enough that what is not all is not told as 100 %.

    >>> below_all_str(0.93), below_all_str(0.9953), below_all_str(0.99996), below_all_str(1.0)
    ('93 %', '99.5 %', '99.996 %', '100 %')
    """
    digits = next((digits for digits in range(1, 4) if round(100 * share, digits) < 100), None)
    return percent_str(share) if share < 0.995 or digits is None else f"{100 * share:.{digits}f} %"


def percent_up(share: float) -> str:
    """A share in percent, as `percent_str` but rounded up: for what is at most so much.

    >>> percent_up(0.2549), percent_up(0.00131), percent_up(0.25), percent_up(1.7e-8), percent_up(2.2e-16)
    ('26 %', '0.14 %', '25 %', '0.0001 %', '0 %')
    """
    value = 100 * share
    if value < 1e-9:  # rounding
        return percent_str(share)
    value = max(value, 1e-4)
    digits = 1 if value >= 9.95 else 10.0 ** (1 - math.floor(math.log10(value)))
    return percent_str(math.ceil(value * digits - 1e-9) / digits / 100)


def times_up(factor: float) -> str:
    """A factor with two decimals below ten, else one, rounded up: for what is at most so many times another.

    >>> times_up(2.021), times_up(4.0), times_up(55.64)
    ('2.03', '4', '55.7')
    """
    digits = 100 if factor < 10 else 10
    return f"{math.ceil(factor * digits - 1e-9) / digits:.10g}"


__all__ = ["below_all_str", "bytes_of", "bytes_str", "count_str", "large_str", "percent_str", "percent_up",
           "seconds_str", "times_up"]
