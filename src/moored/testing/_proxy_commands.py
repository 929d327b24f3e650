"""The commands of the proxy program, one per line of standard input."""

from __future__ import annotations

from collections.abc import Callable

from ._proxy import FaultProxy
from ._proxy_answer import Answer
from ._proxy_faults import Direction

__all__ = ["HELP", "run_command"]

HELP = """\
stall                        stop forwarding; connections stay open and no byte is lost
black-hole                   drop all bytes and reply to nothing
resume                       forward again
refuse on|off                refuse new connections
reset                        reset every open connection now
limit RATE [BURST] | off     accept so many new connections per second
latency SECONDS [up|down]    deliver every byte so much later
throttle BYTES [up|down]     forward so many bytes per second on each connection (off: no limit)
cut BYTES [up|down]          reset each connection after so many more bytes (off: no cut)
heal                         remove every fault
status                       show the faults and the counters
help                         show this list
quit                         end the proxy, as the end of the input does"""


def run_command(proxy: FaultProxy, line: str, answer: Answer | None = None) -> str:
    """Run a command and return its output; raise ValueError if it is wrong.

    `answer` is sent to connections over the limit.
    """
    word, *rest = line.split()
    commands: dict[str, Callable[[list[str]], str | None]] = {
        "stall": lambda rest: _without_arguments(rest, proxy.stall),
        "black-hole": lambda rest: _without_arguments(rest, proxy.black_hole),
        "resume": lambda rest: _without_arguments(rest, proxy.resume),
        "heal": lambda rest: _without_arguments(rest, proxy.heal),
        "reset": lambda rest: f"reset {proxy.reset()} connections",
        "refuse": lambda rest: proxy.refuse(_switch(rest)),
        "limit": lambda rest: _limit(proxy, rest, answer),
        "latency": lambda rest: proxy.latency(_number(rest) or 0.0, _direction(rest)),
        "throttle": lambda rest: proxy.throttle(_number(rest), _direction(rest)),
        "cut": lambda rest: proxy.cut_after(_whole(_number(rest)), _direction(rest)),
        "status": lambda rest: _status(proxy),
        "help": lambda rest: HELP,
    }
    if word not in commands:
        raise ValueError(f"unknown command {word!r}: help lists the commands")
    return commands[word](rest) or repr(proxy)


def _without_arguments(rest: list[str], call: Callable[[], None]) -> None:
    if rest:
        raise ValueError(f"the command takes no arguments, not {' '.join(rest)!r}")
    call()


def _switch(rest: list[str]) -> bool:
    if rest not in (["on"], ["off"]):
        raise ValueError("the command needs on or off")
    return rest == ["on"]


def _limit(proxy: FaultProxy, rest: list[str], answer: Answer | None) -> None:
    if len(rest) > 2:
        raise ValueError("the command takes RATE and BURST, or off")
    burst = _number(rest[1:]) if rest[1:] else None
    proxy.limit(_number(rest), burst, answer=answer)


def _number(rest: list[str]) -> float | None:
    if not rest:
        raise ValueError("the command needs a number, or off")
    if rest[0] == "off":
        return None
    try:
        return float(rest[0])
    except ValueError:
        raise ValueError(f"{rest[0]!r} is not a number") from None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _direction(rest: list[str]) -> Direction | None:
    match rest[1:]:
        case []:
            return None
        case ["up"]:
            return "up"
        case ["down"]:
            return "down"
    raise ValueError(f"the direction must be up or down, not {' '.join(rest[1:])!r}")


def _status(proxy: FaultProxy) -> str:
    counts = " ".join(f"{name}={value}" for name, value in proxy.statistics()._asdict().items())
    return f"{proxy!r}\n{counts}"
