"""The text output of the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from moored.kernel import Tree, duration
from moored.service import Setting, cost_words

__all__ = ["outages", "show_config", "show_explanation", "status", "tree", "tree_of"]

#: Columns of a table that is not printed on a terminal.
PIPED = 1000
_STYLES = {
    "running": "green",
    "active": "bold green",
    "sleeping": "bold green",
    "degraded": "bold yellow",
    "starting": "bold yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "failed": "bold red",
    "finished": "dim",
    "stopped": "dim",
}


def show(data: Any, as_json: bool, for_people: Callable[[Console], None]) -> None:
    """Print data as JSON, or as text by calling `for_people`."""
    if as_json:
        typer.echo(json.dumps(data, indent=2, default=str))
    else:
        console = Console(highlight=False, soft_wrap=True)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = PIPED  # a program reads one row per line
        for_people(console)


def table(*titles: str) -> Table:
    """Return an empty table without lines."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        made.add_column(title, overflow="fold", justify="right" if title == "fence" else "left")
    return made


def status(state: Mapping[str, Any], url: str) -> Group:
    """Return the status in one line, then the conditions, the machines and the tree."""
    head = Text(f"moored {state['version']} at {url} is ")
    head.append(state["status"], _STYLES.get(state["status"], ""))
    head.append(f", up {duration(state['uptime'])}, pid {state['pid']}")
    parts: list[RenderableType] = [head]
    if sentence := state.get("sentence"):
        parts.append(Text(sentence))
    parts += [Text(), _conditions(state["conditions"])]
    for machine in state["machines"]:
        at = f"{machine['doing']} for {duration(machine['for'])}"
        parts.append(Text(f"  {machine['name']}  {at}"))
    for name, kind in state.get("kinds", {}).items():
        if kind == "manager":
            broken = state[name].get("error")
            parts.append(Text(f"     {broken}") if broken else _stream(state[name]))
    parts += [*outages(state.get("outages", ())), Text(), tree(state["tree"])]
    return Group(*parts)


def outages_since(state: Mapping[str, Any], since: float) -> list[dict[str, Any]]:
    """Return what was still wrong at a wall-clock time, or went wrong later."""
    return [
        each
        for each in state["outages"]
        if each["lasted"] is None or each["wall"] + each["lasted"] >= since
    ]


def outages(found: Iterable[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield what went wrong: when, for how long, and why."""
    for each in found:
        lasted = each["lasted"]
        time = f"{datetime.fromtimestamp(each['wall'], tz=UTC).astimezone():%H:%M:%S}"
        degraded = set(each["parts"].values()) == {"degraded"}
        verb = ("were" if len(each["parts"]) > 1 else "was") if degraded else "did"
        how = f"{verb} {'degraded' if degraded else 'not work'} from {time} on"
        how_long = f"for {duration(lasted)}" if lasted is not None else "until now"
        lasted_of = each.get("lasted_of", {})
        if len(set(lasted_of.values())) > 1 and lasted is not None:
            how_long += ", until all worked again"
            parts = [f"{part} ({duration(one)})" for part, one in lasted_of.items()]
        else:
            parts = list(each["parts"])
        yield Text(f"  {', '.join(parts)} {how}, {how_long}")
        yield from (Text(f"    because  {cause}") for cause in each["because"])
        if each["cost"]:
            yield Text(f"    cost     {cost_words(each['cost'])}")


def tree(data: Mapping[str, Any]) -> Group:
    """Return the supervision tree, with the states in colour on a terminal."""
    lines = [Text(line) for line in str(tree_of(data)).splitlines()]
    for line in lines:
        for state, style in _STYLES.items():
            line.highlight_regex(rf"(?<=  ){state}(?= for )", style)
    return Group(*lines)


def show_explanation(console: Console, explanation: Mapping[str, Any]) -> None:
    """Print a component and the chain of causes."""
    console.print(Text(explanation["component"], "bold"))
    for line in str(explanation["explanation"]).splitlines():
        text = Text(line)
        text.highlight_regex(r"^  (because|before|then|so|known|cost|lost) ", "cyan")
        console.print(text)


def show_config(console: Console, settings: list[Setting]) -> None:
    """Print every setting with its value and the source of the value."""
    rows = table("setting", "value", "from")
    for setting in settings:
        style = "dim" if setting.source == "default" else ""
        rows.add_row(setting.name, Text(_shown(setting.value)), setting.source, style=style)
    console.print(rows)


def tree_of(data: Mapping[str, Any]) -> Tree:
    """Return a tree from JSON; fields that only a newer service knows are ignored."""
    known = {field.name: data[field.name] for field in fields(Tree) if field.name in data}
    children = tuple(tree_of(child) for child in data.get("children", ()))
    return Tree(**{**known, "children": children})


def _shown(value: object) -> str:
    if value in (None, ()):
        return "—"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _stream(now: Mapping[str, Any]) -> Table:
    """Return a table of a stream: its positions, lag, slot, pools and consumers."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))

    def row(name: str, text: str) -> None:
        table.add_row(Text("   "), name, Text(text))

    if now["fatal"]:
        row("failed", now["fatal"])
    if (holder := now["lock"]["holder"]) is not None:
        who = f'application "{holder["application"]}", for {duration(holder["age"])}'
        row("lock", f"held by backend {holder['pid']} ({who})")
    for blocker in now["slot_blockers"]:
        row(
            "slot",
            f"waits for backend {blocker['pid']}, open for {duration(blocker['age'])}"
            + (f": {blocker['query']}" if blocker["query"] else ""),
        )
    if now["flushed"] is not None:
        row(
            "positions",
            f"received {now['received']}, flushed {now['flushed']}, last seen " + now["last_seen"],
        )
    if now["lag"] is not None:
        row("lag", f"{decimal(now['lag']['bytes'])}, {duration(now['lag']['seconds'])}")
    if now["slot"]["retained"] is not None:
        row("slot", f"{now['slot']['name']} retains {decimal(now['slot']['retained'])} of WAL")
    for role, pool in now["pools"].items():
        row(
            f"{role} pool",
            f"{pool['state']}, {pool['connected']} of {pool['max_size']}, "
            f"{pool['in_use']} in use, {pool['waiting']} waiting",
        )
    for name, consumer in now["consumers"].items():
        row(
            f"consumer {name}",
            f"{'attached' if consumer['attached'] else 'detached'}, acknowledged "
            f"{consumer['acknowledged'] or 'nothing yet'}, {consumer['outstanding']} outstanding",
        )
    return table


def _conditions(conditions: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, condition in conditions.items():
        mark = Text("●", "green") if condition["met"] else Text("○", "yellow")
        words = "met" if condition["met"] else "missing"
        table.add_row(
            Text("  ") + mark,
            name,
            f"{words} for {duration(condition['for'])}",
            condition["detail"] or "",
        )
    return table
