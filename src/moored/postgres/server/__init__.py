"""The server: connections to it, their setup for streaming, administrative queries, and errors."""

from ._connect import connect, cut, has_input, uncancelled
from ._create_schema import CREATE_SCHEMA
from ._faults import Diagnosis, FaultVerdict, diagnose
from ._pooled import pool_by
from ._resolver import Resolver
from ._schema_trigger import DROP_SCHEMA_TRIGGER, SCHEMA_TRIGGER
from ._setup import Findings, Setup, Step

__all__ = [
    "CREATE_SCHEMA",
    "DROP_SCHEMA_TRIGGER",
    "SCHEMA_TRIGGER",
    "Diagnosis",
    "FaultVerdict",
    "Findings",
    "Resolver",
    "Setup",
    "Step",
    "connect",
    "cut",
    "diagnose",
    "has_input",
    "pool_by",
    "uncancelled",
]
