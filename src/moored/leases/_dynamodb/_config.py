"""The configuration of the DynamoDB store, from its URL."""

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

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
#: The region for a local server, which ignores it.
_LOCAL_REGION = "us-east-1"


@dataclass(frozen=True)
class DynamoConfig:
    """The settings of a `dynamodb://TABLE` URL."""

    #: The table's name, which is case-sensitive.
    table: str
    #: The region; None takes it from the environment or the profile.
    region: str | None
    #: The URL of a server other than AWS's; None means AWS.
    endpoint_url: str | None
    #: "slots", or "counter" for the schema with a counter item.
    layout: str
    #: Whether a missing table is created; by default only on a local server.
    create: bool
    #: Timeout of one request in seconds, including its retries.
    timeout: float
    #: By how many seconds the clocks of two DynamoDB servers may differ.
    skew: float
    #: Seconds between two sweeps of the counter layout for expired leases.
    sweep_every: float
    #: The largest number of connections.
    connections: int

    @classmethod
    def from_url(cls, url: str) -> DynamoConfig:
        """Parse a URL; raises one `StoreMisconfigured` that lists all mistakes."""
        parsed = parse(url)
        settings = UrlParameters(parsed)
        endpoint = settings.given("endpoint_url")
        local = endpoint is not None and _is_local(endpoint)
        layout = settings.text("layout", SLOTS)
        if not _TABLE.fullmatch(parsed.host):
            settings.wrong(
                f"the table's name {parsed.host!r} must have 3 to 255 of the characters "
                "a-z A-Z 0-9 _ . -, as in dynamodb://leases?region=eu-central-1"
            )
        if parsed.path.strip("/"):
            settings.wrong(f"the URL must end with the table's name, without {parsed.path!r}")
        if layout not in (SLOTS, COUNTER):
            settings.wrong(f"layout={layout!r} must be {SLOTS!r} or {COUNTER!r}")
        if endpoint is not None and not _is_web(endpoint):
            settings.wrong(f"endpoint_url={endpoint!r} must be http://HOST:PORT or https://…")
        config = cls(
            table=parsed.host,
            region=settings.given("region") or (_LOCAL_REGION if local else None),
            endpoint_url=endpoint,
            layout=layout,
            create=settings.flag("create", local),
            timeout=settings.seconds("timeout", 5.0),
            skew=_skew(settings),
            sweep_every=settings.seconds("sweep_every", 30.0),
            connections=settings.count("connections", 10),
        )
        settings.done()
        return config

    @property
    def local(self) -> bool:
        """Whether the server runs on this machine, as in development and tests."""
        return self.endpoint_url is not None and _is_local(self.endpoint_url)

    @property
    def place(self) -> str:
        """The table and the server, for messages."""
        return f"{self.table} at {self.endpoint_url or self.region or 'AWS'}"


def _skew(settings: UrlParameters) -> float:
    # 0 is allowed here (a single server), which `seconds` refuses.
    return 0.0 if settings.given("skew") in ("0", "0.0") else settings.seconds("skew", 0.1)


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
