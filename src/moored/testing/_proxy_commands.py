"""The commands of a running proxy, one per line of its standard input."""

from __future__ import annotations

from collections.abc import Callable

from moored.testing._proxy import FaultProxy
from moored.testing._proxy_answer import Answer
from moored.testing._proxy_faults import Direction

__all__ = ["HELP", "obey"]

HELP = """\
stall                        stop carrying bytes; connections stay open and nothing is lost
black-hole                   swallow all bytes and answer nothing
resume                       carry bytes again
refuse on|off                refuse new connections
reset                        reset every open connection now
limit RATE [BURST] | off     accept so many new connections a second
latency SECONDS [up|down]    deliver everything so much later
throttle BYTES [up|down]     carry so many bytes a second on each connection (off: no limit)
cut BYTES [up|down]          reset each connection after so many more bytes (off: do not)
heal                         lift every fault
status                       what it does and what it has counted
help                         these lines
quit                         end, as the end of the input does"""


def obey(proxy: FaultProxy, line: str, answer: Answer | None = None) -> str:
    """Carry out a command line and return its output; raises ValueError for a wrong one.

    `answer` is for connections over the limit.
    """
    word, *rest = line.split()
    commands: dict[str, Callable[[list[str]], str | None]] = {
        "stall": lambda rest: _plain(rest, proxy.stall),
        "black-hole": lambda rest: _plain(rest, proxy.black_hole),
        "resume": lambda rest: _plain(rest, proxy.resume),
        "heal": lambda rest: _plain(rest, proxy.heal),
        "reset": lambda rest: f"reset {proxy.reset()} connections",
        "refuse": lambda rest: proxy.refuse(_switch(rest)),
        "limit": lambda rest: _limit(proxy, rest, answer),
        "latency": lambda rest: proxy.latency(_number(rest) or 0.0, _way(rest)),
        "throttle": lambda rest: proxy.throttle(_number(rest), _way(rest)),
        "cut": lambda rest: proxy.cut_after(_whole(_number(rest)), _way(rest)),
        "status": lambda rest: _status(proxy),
        "help": lambda rest: HELP,
    }
    if word not in commands:
        raise ValueError(f"there is no command {word!r}: help lists them")
    return commands[word](rest) or repr(proxy)


def _plain(rest: list[str], call: Callable[[], None]) -> None:
    if rest:
        raise ValueError(f"nothing may follow, and {' '.join(rest)!r} does")
    call()


def _switch(rest: list[str]) -> bool:
    if rest not in (["on"], ["off"]):
        raise ValueError("say on or off")
    return rest == ["on"]


def _limit(proxy: FaultProxy, rest: list[str], answer: Answer | None) -> None:
    if len(rest) > 2:
        raise ValueError("say RATE and BURST, or off")
    burst = _number(rest[1:]) if rest[1:] else None
    proxy.limit(_number(rest), burst, answer=answer)


def _number(rest: list[str]) -> float | None:
    if not rest:
        raise ValueError("say how much, or off")
    if rest[0] == "off":
        return None
    try:
        return float(rest[0])
    except ValueError:
        raise ValueError(f"{rest[0]!r} is no number") from None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _way(rest: list[str]) -> Direction | None:
    match rest[1:]:
        case []:
            return None
        case ["up"]:
            return "up"
        case ["down"]:
            return "down"
    raise ValueError(f"{' '.join(rest[1:])!r} is neither up nor down")


def _status(proxy: FaultProxy) -> str:
    counts = " ".join(f"{name}={value}" for name, value in proxy.statistics()._asdict().items())
    return f"{proxy!r}\n{counts}"
