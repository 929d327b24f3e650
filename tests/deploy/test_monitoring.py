"""The dashboard and the alert rules use only metrics and labels that a service exposes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from moored.app import App
from moored.service import Config

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
#: Labels that Prometheus adds.
ADDED = {"job", "instance"}
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}

_STRING = re.compile(r'"[^"]*"')
_SELECTOR = re.compile(r"([a-z_]\w*)\s*\{([^}]*)\}")
_GROUPING = re.compile(r"\b(by|on|without|ignoring)\s*\(([^)]*)\)")
_WORDS = re.compile(r"(?<![\w.$])([a-z_]\w*)(?!\w)(?!\s*\()")
_OPERATORS = {"by", "on", "unless", "and", "or", "sum", "max", "min", "avg", "count"}


def used(expression: str) -> tuple[set[str], set[str]]:
    """Return the metrics and the labels that an expression of PromQL uses."""
    text = _STRING.sub('""', expression)
    labels = {
        name
        for _, inside in _SELECTOR.findall(text)
        for name in re.findall(r"(\w+)\s*[=!]", inside)
    }
    labels |= {name.strip() for _, names in _GROUPING.findall(text) for name in names.split(",")}
    bare = _GROUPING.sub("", re.sub(r"\{[^}]*\}|\[[^]]*\]", "", text))
    return {word for word in _WORDS.findall(bare) if word not in _OPERATORS}, labels


def exposed() -> dict[str, set[str]]:
    """The labels of each metric of an app with all parts; no server is reached for it."""
    nowhere = "127.0.0.1:9"
    app = App("all", config=Config())
    url = f"postgresql://app@{nowhere}/orders"
    app.pool(url, name="db")
    pg = app.postgres(url)
    app.channel(nowhere)
    app.sessions()
    app.leases("memory://")
    app.broker(pg.outbox, channels=["orders"])

    @app.consumer(pg, "search", on_poison="park")
    async def index(item: object) -> None:
        pass

    found = {"up": ADDED}
    service = app._make(Config(), ())
    for family in service.registry.collect():
        labels = {*getattr(family, "_labelnames", ()), *ADDED}
        for suffix in SUFFIXES.get(family.type, [""]):
            found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Yield each query of the dashboard and the rules, with the texts that use its labels."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"][1:]:
        metric, _, label = variable["definition"].removeprefix("label_values(").rpartition(", ")
        yield metric, f"{{{{{label.rstrip(')')}}}}}"
    for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


async def test_every_metric_and_label_exists() -> None:
    known = exposed()
    checked = set()
    for expression, text in queries():
        metrics, labels = used(expression)
        assert metrics, expression
        assert metrics <= known.keys(), expression
        shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", text))
        assert labels | shown <= set.union(*(known[each] for each in metrics)), expression
        checked |= metrics
    systems = {name.split("_")[1] for name in checked if name.startswith("moored_")}
    assert systems >= {
        "active",
        "postgres",
        "reservoir",
        "outbox",
        "broker",
        "rpc",
        "sessions",
        "leases",
    }


@pytest.mark.parametrize(
    ("expression", "metrics", "labels"),
    [
        ('sum by (a, b) (rate(m_total{c="x y",d!~"z"}[5m])) > 10e9', {"m_total"}, {*"abcd"}),
        ("m == 0 unless on (a) n == 1", {"m", "n"}, {"a"}),
        ("histogram_quantile(0.9, sum by (le) (rate(m_bucket[$__x])))", {"m_bucket"}, {"le"}),
    ],
)
def test_the_names_of_an_expression_are_found(
    expression: str, metrics: set[str], labels: set[str]
) -> None:
    found, named = used(expression)
    assert found == metrics
    assert labels <= named


def test_the_rules_are_valid_and_each_has_a_name_of_its_own() -> None:
    groups: list[Any] = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert {rule["labels"]["severity"] for rule in rules} == {"critical", "warning", "info"}
    if (promtool := shutil.which("promtool")) is not None:
        subprocess.run([promtool, "check", "rules", str(DEPLOY / "alerts.yaml")], check=True)
