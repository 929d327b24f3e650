"""OpenTelemetry: the metrics of Moored, and spans for checkouts, calls and sends.

It needs only the API; where the data goes is decided by the SDK of the program.

- While `instrument()` is not called, no code of this package runs: tracing costs nothing.
- No span and no metric names an account or a recipient, and none contains a known secret.
"""

from moored.kernel import extra

with extra("otel", "moored.otel"):
    import opentelemetry.metrics as _metrics_api  # noqa: F401

from ._metrics import export_metrics
from ._spans import instrument

__all__ = ["export_metrics", "instrument"]
