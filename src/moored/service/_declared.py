"""The settings of a part that are in force, with their defaults and what they mean.

Names, defaults and texts come from the code that takes the settings: the signature and the
`:param …:` lines of a function or a class, or the fields of a dataclass and the `#:` comments
before them.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NamedTuple

from moored.kernel import SECRETS, redacted

__all__ = ["Declared", "fields_of", "parameters_of", "values_of"]

_PARAM = re.compile(r":param (\w+): (.*?)(?=\n\s*:|\n\s*\n|\Z)", re.DOTALL)
_FIELD = re.compile(r"((?:^ +#:.*\n)+) +(\w+):", re.MULTILINE)


class Declared(NamedTuple):
    """One setting, as text."""

    name: str
    value: str
    default: str
    help: str
    #: Whether the value is not the default.
    own: bool


def parameters_of(
    taker: Callable[..., Any], given: Mapping[str, Any], but: Collection[str] = ()
) -> Iterator[Declared]:
    """Yield the documented parameters of a function or a class.

    :param given: the values in force; others have their defaults.
    :param but: parameters to leave out.
    """
    helps = _parameter_helps(taker)
    for name, each in inspect.signature(taker).parameters.items():
        if name in helps and name not in but:
            default = None if each.default is inspect.Parameter.empty else each.default
            yield _declared(name, given.get(name, default), default, helps[name])


def fields_of(config: Any) -> Iterator[Declared]:
    """Yield the documented fields of a dataclass object."""
    config_type: Any = type(config)
    helps = _field_helps(config_type)
    for each in fields(config):
        if each.name in helps:
            default = None if each.default is MISSING else each.default
            yield _declared(each.name, getattr(config, each.name), default, helps[each.name])


def values_of(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass object."""
    return {each.name: getattr(config, each.name) for each in fields(config)}


def _declared(name: str, value: Any, default: Any, text: str) -> Declared:
    return Declared(name, _text(value), _text(default), text, bool(value != default))


@cache
def _parameter_helps(taker: Callable[..., Any]) -> Mapping[str, str]:
    return {name: _words(text) for name, text in _PARAM.findall(inspect.getdoc(taker) or "")}


@cache
def _field_helps(config: type) -> Mapping[str, str]:
    try:
        source = inspect.getsource(config)
    except OSError:  # only the bytecode is installed
        return {each.name: "" for each in fields(config)}
    return {name: _words(text.replace("#:", "")) for text, name in _FIELD.findall(source)}


def _words(text: str) -> str:
    words = " ".join(text.replace("`", "").split())
    return words[:1].upper() + words[1:]


def _text(value: Any) -> str:
    """Return a value for people, without secrets."""
    if value is None or value == "":
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value == math.inf:
        return "no limit"
    if isinstance(value, (int, float)):
        return f"{int(value):,}" if value == round(value) else f"{value:g}"
    if isinstance(value, str):
        return SECRETS.hide(redacted(value))
    if isinstance(value, Mapping):
        return ", ".join(map(str, value)) or "none"  # the names alone: values may be passwords
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(sorted(map(_text, value))) or "none"
    if isinstance(value, (bytes, bytearray)):
        return "set"
    name = getattr(value, "__name__", "")
    return (
        SECRETS.hide(str(value)) if hasattr(value, "__fspath__") else name or type(value).__name__
    )
