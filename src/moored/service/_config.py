"""The configuration: command line over environment over `moored.toml`, checked as a whole.

Every knob is one field of `Config`, with its default, its reader and one sentence that says what it
is for. The names elsewhere follow from the field's: `log_level` is `--log-level`,
`MOORED_LOG_LEVEL` and `log_level = …`.
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

#: Read from the working directory when no other file is named.
FILE_NAME = "moored.toml"
PREFIX = "MOORED_"
DEFAULT = "default"

T = TypeVar("T")


class Knob(NamedTuple):
    """One thing that can be configured, and its names."""

    name: str
    #: The environment variable.
    variable: str
    default: Any
    #: From text or TOML to a value; raises ValueError with the fix.
    parse: Callable[[object], Any]
    #: One sentence for `--help` and the docs, with the reason.
    help: str
    #: What may be shown of a value that is, or holds, a secret; None where all of it may.
    hide: Callable[[Any], str] | None

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
) -> T:
    metadata = {"parse": parse, "help": sentence, "variable": variable, "hide": hide}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, repr=False)
class Config:
    """What `moored serve` runs with; checked when it is made, and never changed after.

    Raises `ConfigError`, which holds every mistake, each with the name of the knob and the fix.
    """

    host: str = _knob(
        "127.0.0.1",
        _parse.host,
        "The address to listen on; other machines reach only an address that is not loopback, "
        "and such a one needs an admin token.",
    )
    port: int = _knob(
        8089,
        _parse.port,
        "The port of the HTTP service; 0 takes a free one, and the start prints which.",
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
        "How many seconds `serve` tries to reach the database URL at its start, so that a server "
        "that is a little late is waited for and a wrong address is an error.",
    )
    replication_url: str | None = _knob(
        None,
        _parse.connection_string,
        "The same server without a pooler before it, for the stream, the lock and administration; "
        "the database URL unless given.",
        variable=PREFIX + "REPLICATION_URL",
        hide=redacted,
    )
    stream_id: str = _knob(
        "default",
        _parse.stream_id,
        "The name of the stream, and of its slot, publication and lock; services with the same "
        "name on one server take turns, so give a second service another.",
    )
    pool_size: int = _knob(
        20,
        _parse.count,
        "How many connections both pools have together: a quarter, at most 4, is for "
        "administration, the rest for work; the server must have room for them and one more.",
    )
    state_dir: Path | None = _knob(  # noqa: RUF009 (it is a field)
        None,
        _parse.directory,
        "Where this machine keeps how far the consumers of the stream are; the default is "
        "`streams` in the data directory, or beside it where a database URL is given.",
    )
    sleep_after: float | None = _knob(
        None,
        _parse.seconds,
        "After how many seconds without use all connections to the database are closed, for a "
        "server that can sleep itself; unless given, they stay.",
    )
    data_dir: Path | None = _knob(  # noqa: RUF009 (it is a field)
        None,
        _parse.directory,
        "Where the embedded PostgreSQL keeps its data from one start to the next; "
        "the default is a directory of the user who runs it.",
    )
    postgres_port: int = _knob(
        0,
        _parse.port,
        "The loopback port of the embedded PostgreSQL, for those who connect to it with tools of "
        "their own; 0 takes a free one.",
    )
    postgres_bin_dir: Path | None = _knob(  # noqa: RUF009 (it is a field)
        None,
        _parse.directory,
        "The bin directory of an installed PostgreSQL to run as the embedded one, where the "
        "version or the build from the wheel does not do.",
    )
    admin_token: str | None = _knob(
        None,
        _parse.secret,
        "The secret that everything but /v1/health asks for; give it by the environment or the "
        "file, because a command line can be read by other users of the machine.",
        hide=lambda token: HIDDEN,
    )
    allowed_hosts: tuple[str, ...] = _knob(
        (),
        _parse.host_names,
        "More names that a request's Host header may carry, for a proxy in front of a loopback "
        "address; others are refused there, so that no web page can reach the service by a name "
        "of its own that points to this machine.",
    )
    log_format: str = _knob(
        "text",
        _parse.choice("text", "json"),
        "How log lines look: `text` for people, `json` for a log store, one object a line.",
    )
    log_level: str = _knob(
        "info",
        _parse.choice("debug", "info", "warning", "error"),
        "The least important lines to log; `debug` adds each HTTP request.",
    )
    #: Where each value came from: an option, a variable, a file, or "default".
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
        """Every knob with what may be shown of its value and where the value came from."""
        for knob in knobs():
            value = getattr(self, knob.name)
            if value is not None and knob.hide is not None:
                value = knob.hide(value)
            yield Setting(knob.name, value, self.sources.get(knob.name, DEFAULT))

    def _contradictions(self) -> Iterator[str]:
        named = {knob.name: knob for knob in knobs()}
        if self.replication_url is not None and self.is_embedded:
            yield (
                f"{self._label(named['replication_url'])}: there is no database URL that it "
                f"belongs to: set {named['database_url'].variable}"
            )
        if not self.is_local and self.admin_token is None:
            yield (
                f"{self._label(named['host'])}: other machines can reach {self.host}, and there is "
                f"no admin token to keep them out: set {PREFIX}ADMIN_TOKEN, or listen on 127.0.0.1"
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
        return f"<Config {' '.join(given) or 'as by default'}>"


class Setting(NamedTuple):
    """One line of the effective configuration; secrets are hidden in it."""

    name: str
    value: Any
    #: An option, a variable, a file, or "default".
    source: str


def knobs() -> Iterator[Knob]:
    """Everything that can be configured, in the order of the docs."""
    for item in fields(Config):
        if "parse" in item.metadata:
            variable = item.metadata["variable"] or PREFIX + item.name.upper()
            parse, sentence, hide = (item.metadata[key] for key in ("parse", "help", "hide"))
            yield Knob(item.name, variable, item.default, parse, sentence, hide)


def load(
    cli: Mapping[str, object],
    environ: Mapping[str, str],
    toml: str | None = None,
    *,
    file: str = FILE_NAME,
) -> Config:
    """The effective configuration out of options, environment variables and the text of a file.

    `cli` maps the names of knobs to what was given, None where nothing was. A variable that is set
    to nothing counts as not set. Raises `ConfigError` with all the mistakes of all three.
    """
    written, mistakes = _read(toml, file)
    mistakes += _misspelt(environ)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for knob in knobs():
        given = (
            (knob.option, cli.get(knob.name)),
            (knob.variable, environ.get(knob.variable) or None),
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
    """Variables that are one slip away from ours; others with our prefix may be somebody else's."""
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
