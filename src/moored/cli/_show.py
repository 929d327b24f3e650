"""The text output of the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from moored.kernel import Tree, duration
from moored.service import Setting, clock_time, span

__all__ = ["outages", "show_config", "show_explanation", "status", "tree", "tree_of"]

#: Columns of a table that is not printed on a terminal.
PIPED = 1000
#: How the head of the status says a state.
_HEADS = {"works": "works", "standby": "stands by"}
_STYLES = {
    "works": "bold green",
    "standby": "bold green",
    "down": "bold red",
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


def status(state: Mapping[str, Any], url: str, *more: RenderableType) -> Group:
    """Return the status in one line, then `more`, the conditions, the machines and the tree."""
    answer = state.get("answer", {})
    word = answer.get("state", state["status"])
    verb, _, word = _HEADS.get(word, f"is {word}").rpartition(" ")
    head = Text(" ".join(filter(None, (f"moored {state['version']} at {url}", verb))) + " ")
    head.append(word, _STYLES.get(answer.get("state", state["status"]), ""))
    head.append(f", up {duration(state['uptime'])}, pid {state['pid']}")
    parts: list[RenderableType] = [head]
    if sentence := state.get("sentence"):
        parts.append(Text(sentence))
    parts += [Text(f"  {label:<8} {words}") for label, words in answer.get("lines", ())]
    for each in (*more, _conditions(state["conditions"])):
        parts += [Text(), each]
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
    return [each for each in state["outages"] if each["ended"] is None or each["ended"] >= since]


def outages(found: Iterable[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield what went wrong: what, when, for how long, why, who waited, and what it cost."""
    for each in found:
        begin, ended, lasted = each["sign_of_life"], each["ended"], span(each["lasted"])
        until = "until now" if ended is None else f"until {clock_time(ended)}"
        number = f"  {each['id']:<3} {clock_time(begin)}  "
        yield Text(f"{number}{each['what']}, for {lasted}, {until}")
        if each["why"]:
            yield Text(f"    because  {each['why']}")
        if others := [part for part in each["parts"] if part != each["root"]]:
            yield Text(f"    with it  {', '.join(others)}")
        if each["cost"]:
            yield Text(f"    cost     {each['cost_words']}")


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
    if now["lag"] is None and now["silent"]:
        row("stream", f"nothing heard for {duration(now['silent'])}: unknown how far behind")
    caught_up = "waits for the stream"
    if now["lag"] is not None:
        caught_up = "caught up"
        row("stream", f"{decimal(now['lag']['bytes'])} behind, {duration(now['lag']['seconds'])}")
    if now["slot"]["retained"] is not None:
        row("log", f"{decimal(now['slot']['retained'])} kept on the server")
    for role, pool in now["pools"].items():
        row(
            f"{role} pool",
            f"{pool['state']}, {pool['connected']} of {pool['max_size']}, "
            f"{pool['in_use']} in use, {pool['waiting']} waiting",
        )
    for name, consumer in now["consumers"].items():
        row(
            f"consumer {name}",
            ("" if consumer["attached"] else "not attached, ")
            + (f"{consumer['outstanding']} to handle" if consumer["outstanding"] else caught_up),
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
