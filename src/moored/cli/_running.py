"""The running service that a command queries: by its URL, or by the configuration here."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

import typer

from moored.service import FILE_NAME, Config, is_loopback, load_config, stored_token

from ._client import Client, CommandFailed

__all__ = ["Token", "Url", "client_for"]

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MOORED_URL",
        help="The URL of the service; the default is the one that the configuration here would "
        "start.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--admin-token", envvar="MOORED_ADMIN_TOKEN", help="The service's admin token, if any."
    ),
]


def client_for(url: str | None, token: str | None, **options: float) -> Client:
    """Return a client of the service at a URL, or of the one that the configuration names.

    Without a token, it has the one that a service of this user on this machine made for itself.
    """
    if url is not None:
        return Client(url, token or _stored(url), **options)
    here = load_config()
    address = _address(here)
    known = token or here.admin_token
    token_in_file = token is None and here.sources.get("admin_token") == FILE_NAME
    host_in_file = here.sources.get("host") == FILE_NAME
    if known and token_in_file != host_in_file and not is_loopback(_host_of(here)):
        both = (FILE_NAME, "the environment")
        owner, other = both if token_in_file else reversed(both)
        raise CommandFailed(
            f"the admin token from {owner} is not sent to {address}, which {other} names: "
            "use --url and --admin-token to allow it, or put both into the same file"
        )
    return Client(address, known or _stored(address), **options)


def _stored(url: str) -> str | None:
    with suppress(ValueError):  # `Client` reports what is wrong with the URL
        place = urlsplit(url if "://" in url else f"http://{url}")
        if is_loopback(place.hostname or ""):
            return stored_token(place.port or 80)
    return None


def _address(config: Config) -> str:
    """Return the URL of a service with this configuration, from this machine."""
    host = _host_of(config)
    return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def _host_of(config: Config) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
