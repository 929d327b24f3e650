"""The configuration: command line before environment before `moored.toml`, checked as a whole.

Every setting is one field of `Config`, with its default, its parser and one sentence about its
purpose. Its other names follow from the field's: `log_level` is `--log-level`, `MOORED_LOG_LEVEL`
and `log_level = …`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moored.kernel import HIDDEN, SECRETS, redacted

from . import _parse
from ._errors import ConfigError

__all__ = ["FILE_NAME", "Config", "Knob", "Setting", "knobs", "load"]

#: The file in the working directory that is read unless another one is named.
FILE_NAME = "moored.toml"
PREFIX = "MOORED_"
DEFAULT = "default"

T = TypeVar("T")


class Knob(NamedTuple):
    """One setting that can be configured, and its names."""

    name: str
    #: The environment variable.
    variable: str
    default: Any
    #: Converts a str or a TOML value; raises ValueError with the fix.
    parse: Callable[[object], Any]
    #: One sentence for `--help` and the docs, with the reason.
    help: str
    #: Returns the value without its secrets; None if it has none.
    hide: Callable[[Any], str] | None
    #: Whether an empty environment variable is a value, and not the same as none.
    may_be_empty: bool = False

    @property
    def option(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")


def _knob(
    default: T,
    parse: Callable[[object], Any],
    sentence: str,
    *,
    variable: str | None = None,
    hide: Callable[[Any], str] | None = None,
    may_be_empty: bool = False,
) -> T:
    metadata = {"parse": parse, "help": sentence, "variable": variable, "hide": hide}
    return field(default=default, metadata={**metadata, "may_be_empty": may_be_empty})


@dataclass(frozen=True, kw_only=True, repr=False)
class Config:
    """The configuration of `moored serve`, validated when it is made, and immutable.

    Raises `ConfigError` with every mistake, each with the name of the setting and the fix.
    """

    host: str = _knob(
        "127.0.0.1",
        _parse.host,
        "The address to listen on; an address that other machines can reach (not loopback) "
        "requires an admin token.",
    )
    port: int = _knob(
        8089,
        _parse.port,
        "The port of the HTTP service; 0 chooses a free one, which is printed at the start.",
    )
    database_url: str | None = _knob(
        None,
        _parse.connection_string,
        "The PostgreSQL to use; without one, an embedded PostgreSQL is started, "
        "so that nothing has to be installed.",
        variable="DATABASE_URL",
        hide=redacted,
    )
    database_wait: float = _knob(
        5.0,
        _parse.seconds,
        "How many seconds `serve` tries to reach the database URL at its start before it exits "
        "with an error; a server that starts a little later is waited for.",
    )
    replication_url: str | None = _knob(
        None,
        _parse.connection_string,
        "The URL of the same server without a pooler, for the stream, the lock and "
        "administration; the default is the database URL.",
        variable=PREFIX + "REPLICATION_URL",
        hide=redacted,
    )
    notify_url: str | None = _knob(
        None,
        _parse.connection_string_or_empty,
        "The URL of the same server without a pooler, for LISTEN; without one, the first "
        "subscription uses the database URL, unless that leads to a pooler; empty for no listener.",
        variable="NOTIFY_URL",
        hide=redacted,
        may_be_empty=True,
    )
    stream_id: str = _knob(
        "default",
        _parse.stream_id,
        "The name of the stream, and of its slot, publication and lock; of several services with "
        "the same name on one server, one is active and the others stand by.",
    )
    pool_size: int = _knob(
        20,
        _parse.count,
        "How many connections both pools have together: a quarter, at most 4, for "
        "administration, the rest for work; the server must allow them and one more.",
    )
    state_dir: Path | None = _knob(  # noqa: RUF009 (it is a field)
        None,
        _parse.directory,
        "The directory for the positions of the stream's consumers; the default is "
        "`streams` in the data directory, or beside it if a database URL is given.",
    )
    sleep_after: float | None = _knob(
        None,
        _parse.seconds,
        "After how many idle seconds all connections to the database are closed, for a server "
        "that can sleep itself; by default they stay open.",
    )
    data_dir: Path | None = _knob(  # noqa: RUF009 (it is a field)
        None,
        _parse.directory,
        "The directory where the embedded PostgreSQL keeps its data; "
        "the default depends on the user who runs the service.",
    )
    postgres_port: int = _knob(
        0,
        _parse.port,
        "The loopback port of the embedded PostgreSQL, for other clients such as psql; "
        "0 chooses a free one.",
    )
    postgres_bin_dir: Path | None = _knob(  # noqa: RUF009 (it is a field)
        None,
        _parse.directory,
        "The bin directory of an installed PostgreSQL to run as the embedded one, for another "
        "version or build than the wheel's.",
    )
    admin_token: str | None = _knob(
        None,
        _parse.secret,
        "The secret that every request except /v1/health must present; set it in the environment "
        "or the file, because other users of the machine can read a command line; without one, "
        "`serve` makes a new one at each start, and prints it as a link.",
        hide=lambda token: HIDDEN,
    )
    read_token: str | None = _knob(
        None,
        _parse.secret,
        "A second secret, for requests that change nothing, such as those of Prometheus and of "
        "people who look at the page: whoever has it cannot stop a session or press a button.",
        hide=lambda token: HIDDEN,
    )
    no_token: bool = _knob(
        False,
        _parse.flag,
        "Require no token: every user of this machine has access, and everyone who can reach a "
        "proxy in front that does not tell so, because its requests look like those of this "
        "machine.",
    )
    allowed_hosts: tuple[str, ...] = _knob(
        (),
        _parse.host_names,
        "Further names that the Host header of a request may contain, for a proxy in front of a "
        "loopback address; other names are refused there, so that no web page can reach the "
        "service through a host name of its own that resolves to this machine (DNS rebinding).",
    )
    broker_channels: tuple[str, ...] = _knob(
        (),
        _parse.names,
        "The channels of live events that browsers may subscribe to at /v1/subscribe; without "
        "any, the service has no broker.",
    )
    broker_source: str = _knob(
        "outbox",
        _parse.broker_source,
        "Where live events come from: `outbox` (nothing is lost), `listener` (NOTIFY; what was "
        "sent while the connection was down is lost), or the URL of a Redis with a stream that "
        "other programs fill.",
        hide=redacted,
    )
    broker_keys: Path | None = _knob(  # noqa: RUF009 (it is a field)
        None,
        _parse.directory,
        "The file with the API keys of subscribers, a key and its tenant on each line; it is read "
        "again when it has changed.",
    )
    broker_jwt_key: Path | None = _knob(  # noqa: RUF009 (it is a field)
        None,
        _parse.directory,
        "The file with the secret or the public key (PEM) by which the JSON web tokens of "
        "subscribers are checked.",
    )
    broker_jwks_url: str | None = _knob(
        None,
        _parse.web_url,
        "The URL of the keys (a JWK set) by which the JSON web tokens of subscribers are checked, "
        "in place of a file; it is read again for a key that is not known.",
        hide=redacted,
    )
    broker_jwt_algorithm: str = _knob(
        "HS256",
        _parse.algorithm,
        "The algorithm of the JSON web tokens; no other is accepted, whatever a token says.",
    )
    broker_tenant: str = _knob(
        "org_id",
        _parse.text,
        "The field of an event's payload, and the claim of a token, that names the tenant.",
    )
    broker_user: str | None = _knob(
        None,
        _parse.text,
        "The field of an event's payload that names the only user of the tenant who gets the "
        "event; the user of a stream is the claim `sub` of its token.",
    )
    broker_tenant_form: str = _knob(
        "text",
        _parse.choice("text", "uuid"),
        "What names a tenant: `text` (1 to 200 characters, or an integer; a UUID in any spelling "
        "is one name), or `uuid`, so that an event or a token with anything else is refused.",
    )
    broker_origins: tuple[str, ...] = _knob(
        (),
        _parse.names,
        "The origins of web pages that may subscribe from another host (CORS), such as "
        "https://app.example.org.",
    )
    broker_max_streams: int = _knob(
        1000,
        _parse.count,
        "How many streams may be open at a time; fewer if the process may not open so many files, "
        "because each has one.",
    )
    log_format: str = _knob(
        "text",
        _parse.choice("text", "json"),
        "The format of log lines: `text` for people, `json` for a log store, one object per line.",
    )
    log_level: str = _knob(
        "info",
        _parse.choice("debug", "info", "warning", "error"),
        "The lowest level to log; `debug` adds each HTTP request.",
    )
    #: The source of each value: an option, a variable, a file, or "default".
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        mistakes = []
        for knob in knobs():
            value = getattr(self, knob.name)
            if knob.hide is redacted:
                SECRETS.add_from(str(value))
            elif knob.hide is not None and value is not None:
                SECRETS.add(str(value))
            if value is None and knob.default is None:
                continue
            try:
                object.__setattr__(self, knob.name, knob.parse(value))
            except ValueError as error:
                mistakes.append(f"{self._label(knob)}: {error}")
                object.__setattr__(self, knob.name, knob.default)
        mistakes += self._contradictions()
        if mistakes:
            raise ConfigError(*mistakes)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the service."""
        return _parse.is_loopback(self.host)

    @property
    def is_embedded(self) -> bool:
        """Whether the service starts a PostgreSQL of its own."""
        return self.database_url is None

    def settings(self) -> Iterator[Setting]:
        """Yield every setting with its value, without secrets, and the source of the value."""
        for knob in knobs():
            value = getattr(self, knob.name)
            if value is not None and knob.hide is not None:
                value = knob.hide(value)
            yield Setting(knob.name, value, self.sources.get(knob.name, DEFAULT))

    def _contradictions(self) -> Iterator[str]:
        named = {knob.name: knob for knob in knobs()}
        for name in ("replication_url", "notify_url"):
            if getattr(self, name) and self.is_embedded:
                yield (
                    f"{self._label(named[name])}: it requires a database URL: "
                    f"set {named['database_url'].variable}"
                )
        tokens = self.broker_keys, self.broker_jwt_key, self.broker_jwks_url
        if self.broker_channels and tokens == (None, None, None):
            yield (
                f"{self._label(named['broker_channels'])}: subscribers need tokens: set "
                f"{named['broker_keys'].variable}, {named['broker_jwt_key'].variable} or "
                f"{named['broker_jwks_url'].variable}"
            )
        if None not in tokens[1:]:
            yield (
                f"{self._label(named['broker_jwks_url'])}: a file with a key is set too: leave out "
                f"{named['broker_jwt_key'].variable}"
            )
        if self.no_token and (self.admin_token or self.read_token):
            yield (
                f"{self._label(named['no_token'])}: a token is set too: leave out one of them "
                f"({PREFIX}ADMIN_TOKEN, {PREFIX}READ_TOKEN)"
            )
        if self.read_token is not None and self.read_token == self.admin_token:
            yield (
                f"{self._label(named['read_token'])}: it is the admin token, which may do "
                "everything: choose another one"
            )
        if not self.is_local and self.admin_token is None:
            yield (
                f"{self._label(named['host'])}: other machines can reach {self.host}, which "
                f"requires an admin token: set {PREFIX}ADMIN_TOKEN, or listen on 127.0.0.1"
            )

    def _label(self, knob: Knob) -> str:
        source = self.sources.get(knob.name, knob.name)
        return (
            source
            if source in (knob.name, knob.option, knob.variable)
            else f"{knob.name} in {source}"
        )

    def __repr__(self) -> str:
        given = (f"{s.name}={s.value}" for s in self.settings() if s.source != DEFAULT)
        return f"<Config {' '.join(given) or 'defaults'}>"


class Setting(NamedTuple):
    """One setting of the effective configuration, with secrets hidden."""

    name: str
    value: Any
    #: An option, a variable, a file, or "default".
    source: str


def knobs() -> Iterator[Knob]:
    """Yield every setting, in the order of the docs."""
    for item in fields(Config):
        if "parse" in item.metadata:
            variable = item.metadata["variable"] or PREFIX + item.name.upper()
            names = ("parse", "help", "hide", "may_be_empty")
            yield Knob(item.name, variable, item.default, *(item.metadata[key] for key in names))


def load(
    cli: Mapping[str, object],
    environ: Mapping[str, str],
    toml: str | None = None,
    *,
    file: str = FILE_NAME,
) -> Config:
    """Return the configuration from options, environment variables and the text of a file.

    `cli` maps the names of settings to the options' values, None for an option that was not used.
    An empty variable counts as not set, except NOTIFY_URL. Raises `ConfigError` with the mistakes
    of all three.
    """
    written, mistakes = _read(toml, file)
    mistakes += _misspelt(environ)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for knob in knobs():
        given = (
            (knob.option, cli.get(knob.name)),
            (knob.variable, _variable(environ, knob)),
            (file, written.get(knob.name)),
        )
        for source, value in given:
            if value is not None:
                values[knob.name], sources[knob.name] = value, source
                break
    try:
        config = Config(**values, sources=sources)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(*mistakes, *error.mistakes) from None
    if mistakes:
        raise ConfigError(*mistakes)
    return config


def _variable(environ: Mapping[str, str], knob: Knob) -> str | None:
    value = environ.get(knob.variable)
    return value if value or knob.may_be_empty else None


def _read(toml: str | None, file: str) -> tuple[dict[str, object], list[str]]:
    try:
        written = tomllib.loads(toml or "")
    except tomllib.TOMLDecodeError as error:
        return {}, [f"{file}: it is not valid TOML: {error}"]
    known = [knob.name for knob in knobs()]
    return written, [
        f"{name} in {file}: there is no such setting" + _suggestion(name, known, cutoff=0.6)
        for name in written
        if name not in known
    ]


def _misspelt(environ: Mapping[str, str]) -> list[str]:
    """Report variables with nearly the name of ours; other programs may use our prefix too."""
    known = [knob.variable for knob in knobs()]
    return [
        f"{name}: there is no such variable" + hint
        for name in environ
        if name.startswith(PREFIX)
        and name not in known
        and (hint := _suggestion(name, known, cutoff=0.9))
    ]


def _suggestion(name: str, known: list[str], *, cutoff: float) -> str:
    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    if close:
        return f"; did you mean {close[0]}?"
    return "" if cutoff > 0.6 else f"; there are: {', '.join(known)}"
