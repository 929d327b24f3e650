"""The running service that a command queries: by its URL, or by the configuration here."""

from __future__ import annotations

from typing import Annotated

import typer

from moored.service import FILE_NAME, Config, is_loopback, load_config

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
    """Return a client of the service at a URL, or of the one that the configuration names."""
    if url is not None:
        return Client(url, token, **options)
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
    return Client(address, known, **options)


def _address(config: Config) -> str:
    """Return the URL of a service with this configuration, from this machine."""
    host = _host_of(config)
    return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def _host_of(config: Config) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
