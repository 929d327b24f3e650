"""The service: an HTTP app, a live page and metrics for one supervised tree.

The service mounts and wires systems (parts), and makes no decisions for them. Invariants:

- `/v1/health` responds as soon as the process listens, and reports "active" only while every part
  is active;
- HTTP is stopped before the parts that it shows, and nothing is left running at the end;
- no token, and no password of a URL, is ever printed, logged or sent, but for the link with the
  token that `serve` makes for itself.
"""

from moored.kernel import extra

with extra("service", "moored.service"):
    import prometheus_client as _prometheus_client  # noqa: F401
    import starlette as _starlette  # noqa: F401
    import structlog as _structlog  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401

from ._access import refusal
from ._broker_part import BROKER_PATHS, DRAIN, broker_health
from ._config import FILE_NAME, Config, Knob, Setting, knobs, load
from ._config_file import load_config
from ._database import data_dir_of, state_dir_of
from ._declared import Declared, fields_of, parameters_of, values_of
from ._errors import CannotListen, ConfigError, DatabaseUnreachable, ServiceError
from ._graph import KINDS
from ._health import HTTP, READY_STATES, Status
from ._parse import connection_string, is_loopback
from ._part import Part, System, Wiring, cost_words, costs_of
from ._serve import serve
from ._service import Service
from ._shown_postgres import ShownPostgres, place_of
from ._spans import clock_time, span
from ._token_file import stored_token
from ._truth import Truth

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # Running the service
    "Service",
    "serve",
    # Parts
    "BROKER_PATHS",
    "DRAIN",
    "Declared",
    "HTTP",
    "KINDS",
    "Part",
    "READY_STATES",
    "ShownPostgres",
    "Status",
    "System",
    "Truth",
    "Wiring",
    "broker_health",
    "clock_time",
    "cost_words",
    "costs_of",
    "fields_of",
    "parameters_of",
    "values_of",
    "refusal",
    "span",
    # Configuration
    "FILE_NAME",
    "Config",
    "Knob",
    "Setting",
    "connection_string",
    "data_dir_of",
    "is_loopback",
    "knobs",
    "load",
    "load_config",
    "place_of",
    "state_dir_of",
    "stored_token",
    # Errors
    "CannotListen",
    "ConfigError",
    "DatabaseUnreachable",
    "ServiceError",
]
