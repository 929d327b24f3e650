"""The commands of the proxy program, one per line of standard input."""

from __future__ import annotations

from typing import Any

from ._proxy import FaultProxy
from ._proxy_answer import Answer

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
    words: list[Any] = line.split() or [""]
    match words:
        case ["stall"]:
            proxy.stall()
        case ["black-hole"]:
            proxy.black_hole()
        case ["resume"]:
            proxy.resume()
        case ["heal"]:
            proxy.heal()
        case ["reset"]:
            return f"reset {proxy.reset()} connections"
        case ["refuse", "on" | "off" as switch]:
            proxy.refuse(switch == "on")
        case ["limit", rate]:
            proxy.limit(_number(rate), answer=answer)
        case ["limit", rate, burst]:
            proxy.limit(_number(rate), _number(burst), answer=answer)
        case ["latency", seconds, *rest] if len(rest) < 2:
            proxy.latency(_number(seconds) or 0.0, *rest)
        case ["throttle", rate, *rest] if len(rest) < 2:
            proxy.throttle(_number(rate), *rest)
        case ["cut", size, *rest] if len(rest) < 2:
            number = _number(size)
            proxy.cut_after(None if number is None else int(number), *rest)
        case ["status"]:
            counts = proxy.statistics()._asdict().items()
            return f"{proxy!r}\n" + " ".join(f"{name}={value}" for name, value in counts)
        case ["help"]:
            return HELP
        case [word, *_]:
            usage = [each for each in HELP.splitlines() if each.split()[0] == word]
            raise ValueError(
                f"usage: {usage[0]}" if usage else f"unknown command {word!r}: try help"
            )
    return repr(proxy)


def _number(word: str) -> float | None:
    try:
        return None if word == "off" else float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number") from None
