"""Formats of JSON schemas as regular expressions. Every accepted text is valid; some valid texts are not
accepted."""

from __future__ import annotations

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:{_YEAR}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})|{_LEAP}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+\-]{_HOUR}:[0-5][0-9])"
_N = "[0-9]{1,9}"
_DURATION_TIME = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION_DATE = f"(?:{_N}D|{_N}M(?:{_N}D)?|{_N}Y(?:{_N}M(?:{_N}D)?)?)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,38}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,5}}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_H}:{_H}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{6}}{_LAST}",
        f"::(?:{_H}:){{5}}{_LAST}",
        f"(?:{_H})?::(?:{_H}:){{4}}{_LAST}",
        f"(?:(?:{_H}:){{0,1}}{_H})?::(?:{_H}:){{3}}{_LAST}",
        f"(?:(?:{_H}:){{0,2}}{_H})?::(?:{_H}:){{2}}{_LAST}",
        f"(?:(?:{_H}:){{0,3}}{_H})?::{_H}:{_LAST}",
        f"(?:(?:{_H}:){{0,4}}{_H})?::{_LAST}",
        f"(?:(?:{_H}:){{0,5}}{_H})?::{_H}",
        f"(?:(?:{_H}:){{0,6}}{_H})?::",
    ]
)
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?\^_`{|}~\-]{1,20}"
_LOCAL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}"
_PCHAR = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_QUERY = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.\-]{{0,30}}://{_HOST}(?::[0-9]{{1,5}})?"
    rf"(?:/{_PCHAR}*)*(?:\?{_QUERY})?(?:#{_QUERY})?"
)

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_N}W)",
    "email": f"{_LOCAL}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": f"(?:{_IPV6})",
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "json-pointer": "(?:/(?:[^~/]|~[01])*)*",
}
"""Formats of strings. Narrower than the standard: an email has at most three atoms of 20 characters before
the ``@``; hostnames have at most six labels of 40 characters; times have no leap second; URIs have a
``//`` and a host name.
"""

INTEGERS: dict[str, tuple[int, int]] = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**53), 2**53)}
"""Formats of integers: (minimum, maximum). int64 is limited to integers that a double represents exactly."""

NOTES = frozenset({"float", "double", "password"})
"""Formats without a constraint on the value."""
