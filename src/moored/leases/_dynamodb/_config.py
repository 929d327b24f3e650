"""How the DynamoDB store is configured: by its URL."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from .._url import parse
from .._url_parameters import UrlParameters

__all__ = ["COUNTER", "SLOTS", "DynamoConfig"]

SLOTS = "slots"
COUNTER = "counter"

_KNOWN = (
    "region",
    "endpoint_url",
    "layout",
    "create",
    "timeout",
    "skew",
    "sweep_every",
    "connections",
)
_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
#: What a local server is asked in when no region is named; it does not care.
_LOCAL_REGION = "us-east-1"


@dataclass(frozen=True)
class DynamoConfig:
    """What a `dynamodb://TABLE` URL says."""

    #: The table's name; its case counts.
    table: str
    #: The region; None leaves it to the environment and the profile.
    region: str | None
    #: Another server than AWS's own; None for that.
    endpoint_url: str | None
    #: "slots", or "counter" for the schema with a counter item.
    layout: str
    #: Whether a missing table is made; by default only on a server of this machine.
    create: bool
    #: How long one request may take in all, further attempts included, in seconds.
    timeout: float
    #: By how many seconds the clocks of two DynamoDB servers may differ.
    skew: float
    #: How often the counter layout looks for leases that have ended, in seconds.
    sweep_every: float
    #: How many connections there may be.
    connections: int

    @classmethod
    def from_url(cls, url: str) -> DynamoConfig:
        """Read a URL; raises one `StoreMisconfigured` that names all its mistakes."""
        parsed = parse(url).check(_KNOWN)
        settings = UrlParameters(parsed)
        given = parsed.parameters.get
        endpoint = given("endpoint_url")
        local = endpoint is not None and _is_local(endpoint)
        layout = settings.text("layout", SLOTS)
        if not _TABLE.fullmatch(parsed.host):
            settings.wrong(
                f"the table's name {parsed.host!r} must have 3 to 255 of the characters "
                "a-z A-Z 0-9 _ . -, as in dynamodb://leases?region=eu-central-1"
            )
        if parsed.path.strip("/"):
            settings.wrong(f"there is nothing below a table, so {parsed.path!r} has no meaning")
        if layout not in (SLOTS, COUNTER):
            settings.wrong(f"layout={layout!r} must be {SLOTS!r} or {COUNTER!r}")
        if endpoint is not None and not _is_web(endpoint):
            settings.wrong(f"endpoint_url={endpoint!r} must be http://HOST:PORT or https://…")
        config = cls(
            table=parsed.host,
            region=given("region") or (_LOCAL_REGION if local else None),
            endpoint_url=endpoint,
            layout=layout,
            create=settings.flag("create", local),
            timeout=settings.seconds("timeout", 5.0),
            skew=_skew(settings, given("skew")),
            sweep_every=settings.seconds("sweep_every", 30.0),
            connections=settings.count("connections", 10),
        )
        settings.done()
        return config

    @property
    def local(self) -> bool:
        """Whether the server runs on this machine, for development and tests."""
        return self.endpoint_url is not None and _is_local(self.endpoint_url)

    @property
    def place(self) -> str:
        """The table and the server, as people name them."""
        return f"{self.table} at {self.endpoint_url or self.region or 'AWS'}"


def _skew(settings: UrlParameters, given: str | None) -> float:
    # Nothing at all may be right here (one server), so that `seconds` is too strict.
    return 0.0 if given in ("0", "0.0") else settings.seconds("skew", 0.1)


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def _is_local(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
