"""Parsers of settings: one function for each kind of value.

Each takes a str (from the command line or the environment) or a TOML value, returns the parsed
value, and raises ValueError with the fix. It accepts its own results again unchanged.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from moored.kernel import SECRETS, redacted, unescaped_password

_STREAM_ID = re.compile(r"[a-z0-9_]{1,40}")
_URL_SCHEMES = ("postgresql://", "postgres://")
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_QUOTED = re.compile(r'"[^"]*"?')


def text(value: object, *, secret: bool = False) -> str:
    """Parse a str that is not blank; the value of a secret is not part of the error."""
    if not isinstance(value, str):
        what = f"a {type(value).__name__}" if secret else repr(value)
        raise ValueError(f"{what} is not a str: put it in quotes")
    if not value.strip():
        raise ValueError("it is empty: set a value, or leave it out")
    return value.strip()


def host(value: object) -> str:
    """Parse an address or a name to listen on."""
    name = text(value).removeprefix("[").removesuffix("]")
    if any(mark in name for mark in "/ []@") or (name.count(":") == 1):
        raise ValueError(
            f"{name!r} is not an address: write only the address, such as 127.0.0.1, without a "
            "scheme or port"
        )
    return name


def is_loopback(name: str) -> bool:
    """Whether only this machine can reach the address; False for names other than localhost."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def port(value: object) -> int:
    """Parse a TCP port; 0 lets the system choose a free one."""
    if isinstance(value, str) and value.startswith("tcp://"):
        raise ValueError(
            f"{value!r} is set by Kubernetes for a service named moored: "
            "set enableServiceLinks: false for the pod, or use --port"
        )
    number = _integer(value)
    if number is None or not 0 <= number <= 65535:
        given = repr(value) if number is None else number
        raise ValueError(f"{given} is not a port: give a number from 0 to 65535")
    return number


def seconds(value: object) -> float:
    """Parse a positive, finite number of seconds."""
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(
            f"{value!r} is not a number of seconds: give one such as 5 or 0.5"
        ) from None
    if not 0 < number < float("inf"):
        raise ValueError(f"{value!r} must be more than 0 seconds, and finite")
    return number


def flag(value: object) -> bool:
    """Parse a bool, or a word for one."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    found = value if isinstance(value, bool) else words.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"{value!r} is neither true nor false: write one of {', '.join(words)}")
    return found


def count(value: object) -> int:
    """Parse a number that is at least 1."""
    number = _integer(value)
    if number is None:
        raise ValueError(f"{value!r} is not a number: give one such as 20")
    if number < 1:
        raise ValueError(f"{number} is too few: give 1 or more")
    return number


def stream_id(value: object) -> str:
    """Parse a name that can be part of the name of a replication slot."""
    name = text(value)
    if not _STREAM_ID.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be part of a slot's name: use 1 to 40 lower-case letters, digits or "
            "underscores"
        )
    return name


def directory(value: object) -> Path:
    """Parse a directory, with `~` for the home directory."""
    if isinstance(value, Path):
        return value
    try:
        return Path(text(value)).expanduser()
    except RuntimeError as error:  # the user does not exist
        raise ValueError(f"{value!r} has no home directory: {error}") from None


def secret(value: object) -> str:
    """Parse a token that an HTTP header can contain without encoding."""
    token = text(value, secret=True)
    if not all("!" <= letter <= "~" for letter in token):
        # The token itself stays out of the message: messages end up in logs.
        raise ValueError("it may contain only visible ASCII characters, and no spaces")
    return token


def host_names(value: object) -> tuple[str, ...]:
    """Parse the names that a Host header may contain: a list, or a str with commas."""
    return tuple(host(name).lower() for name in names(value))


def names(value: object) -> tuple[str, ...]:
    """Parse names: a list, or a str with commas."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, Sequence):
        raise ValueError(f"{value!r} is not a list of names: separate them by commas")
    return tuple(text(name) for name in value)


def broker_source(value: object) -> str:
    """Parse the source of live events: a word, or the URL of a Redis."""
    source = text(value, secret=True)
    if source in ("outbox", "listener") or source.startswith(_REDIS_SCHEMES):
        return source
    raise ValueError("it is not known: choose outbox, listener or a URL such as redis://host")


def web_url(value: object) -> str:
    """Parse a URL of the web."""
    if (url := text(value, secret=True)).startswith(("https://", "http://")):
        return url
    raise ValueError("it is not a URL of the web: write https://host/path")


def connection_string_or_empty(value: object) -> str:
    """Parse a PostgreSQL URL; an empty one is valid."""
    return "" if value == "" else connection_string(value)


def connection_string(value: object) -> str:
    """Parse a PostgreSQL URL, or a libpq `key=value` string."""
    url = text(value, secret=True)
    scheme, mark, rest = url.partition("://")
    if mark and f"{scheme}://" not in _URL_SCHEMES:
        fix = (
            f"postgresql://{_after_user(rest)}"
            if scheme.startswith("postgres")
            else "postgresql://…"
        )
        raise ValueError(f"{SECRETS.hide(scheme)}:// is not PostgreSQL's scheme: write {fix}")
    if unescaped_password(url):
        raise ValueError(
            "its password contains a character that a URL must escape: write %40 for @, %2F for / "
            "and %25 for %"
        )
    if not mark and "=" not in url:
        raise ValueError("it is not a connection string: write postgresql://user@host:5432/name")
    # Imported only if needed: it takes longer than everything else.
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        ports = str(conninfo_to_dict(url).get("port") or "").split(",")
    except psycopg.Error as error:
        reason = str(error).strip().partition("\n")[0]
        if redacted(url) != url:
            # libpq quotes the part that it cannot parse, which may be a part of the password.
            reason = _QUOTED.sub('"…"', reason)
        raise ValueError(f"libpq cannot parse this connection string ({reason})") from None
    for each in filter(None, ports):
        if not (each.strip().isdecimal() and 0 < int(each) < 65536):
            raise ValueError(f"its port {SECRETS.hide(each)!r} is not a number from 1 to 65535")
    return url


def choice(*allowed: str) -> Callable[[object], str]:
    """Return a parser that accepts one of these words, in upper or lower case."""
    known = {word.lower(): word for word in allowed}

    def parse(value: object) -> str:
        word = text(value).lower()
        if word not in known:
            raise ValueError(
                f"{word!r} is not known: choose {', '.join(allowed[:-1])} or {allowed[-1]}"
            )
        return known[word]

    return parse


#: Parses an algorithm of JSON web tokens.
algorithm = choice(*(f"{kind}{size}" for kind in ("HS", "RS", "ES") for size in (256, 384, 512)))


def _integer(value: object) -> int | None:
    """Return an int, or a str as an int; None for everything else."""
    try:
        return None if isinstance(value, bool | float) else int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None


def _after_user(rest: str) -> str:
    """Return the part of a URL after the user and password."""
    return "…@" + rest.rpartition("@")[2] if "@" in rest else rest
