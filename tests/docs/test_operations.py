"""The pages for operators list every metric, event and error of the code."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT, page

import moored
from moored.kernel.prometheus import SourceCollector

SOURCES = sorted((ROOT / "src" / "moored").rglob("*.py"))
MODULES = [
    found.name
    for found in pkgutil.walk_packages(moored.__path__, "moored.")
    if "._" not in found.name and not found.name.endswith("__main__")
]


def first_cells(name: str) -> set[str]:
    """Return the names in the first column of the tables of a page."""
    rows = re.findall(r"^\| (`.*?) \|", page(name), re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`(\w+)`", row)}


def test_every_collector_is_on_the_page_of_metrics() -> None:
    defined = {
        f"{path.relative_to(ROOT / 'src').with_suffix('').as_posix().replace('/', '.')}.{name}"
        for path in SOURCES
        for name in re.findall(r"^class (\w+)\(SourceCollector\[", path.read_text(), re.MULTILINE)
    }
    shown = re.findall(r"^```\{metrics\} (\S+)$", page("operations/metrics"), re.MULTILINE)
    assert sorted(shown) == sorted(defined)
    for name in shown:
        module, _, collector = name.rpartition(".")
        made: SourceCollector[object] = getattr(importlib.import_module(module), collector)()
        assert all(metric.documentation for metric in made.describe())


def test_every_metric_of_the_service_is_listed() -> None:
    source = (ROOT / "src/moored/service/_metrics.py").read_text()
    families = re.findall(r"(gauge|counter|Info\w+)\(\s*\"(moored_\w+)\"", source)
    ends = {"gauge": "", "counter": "_total"}
    made = {name + ends.get(kind, "_info") for kind, name in families}
    assert len(made) > 10
    assert made <= first_cells("operations/service")


def kinds_of(source: str) -> Iterator[str]:
    """Yield the kinds of the events that a module records: `record(text, "state")`, or `kind=`."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("record"):
            named = [each.value for each in call.keywords if each.arg == "kind"]
            for value in (*call.args[1:2], *named):
                if isinstance(value, ast.Constant) and re.fullmatch(r"[a-z_]+", str(value.value)):
                    yield str(value.value)


def test_every_kind_of_event_is_listed() -> None:
    recording = [source for path in SOURCES if "record(" in (source := path.read_text())]
    found = {kind for source in recording for kind in kinds_of(source)}
    assert {"failure", "restarting", "abandoned", "auto_shutdown"} <= found
    assert found <= first_cells("operations/events")


def test_every_public_error_is_listed_with_its_remedy() -> None:
    public = {
        name
        for module in map(importlib.import_module, MODULES)
        for name in getattr(module, "__all__", ())
        if isinstance(value := getattr(module, name), type) and issubclass(value, Exception)
    }
    assert {"PoolTimeout", "StoreUnavailable", "SendUnknown"} <= public
    assert first_cells("operations/errors") == public
