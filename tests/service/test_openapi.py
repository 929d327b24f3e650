"""Random requests, made from the OpenAPI document, get no server error and match the document."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from hypothesis import given, settings

from moored.app import App, ComponentContext
from moored.broker import ApiKeys, MemorySource
from moored.service import Config
from moored.testing import scaled

TOKEN = "a-token-of-twenty-characters"
#: Streams, which do not end.
ENDLESS = ["/v1/events"]


@contextmanager
def served() -> Iterator[str]:
    """Serve an app that has all documented routes, in a thread; yield its address."""
    app = App("shop", config=Config(admin_token=TOKEN))
    app.sessions(storage="memory:")
    keys = ApiKeys({"key": "11111111-1111-1111-1111-111111111111"})
    app.broker(MemorySource(), channels=["orders"], authenticate=keys)

    @app.component
    async def idle(ctx: ComponentContext) -> None:
        await asyncio.Event().wait()

    server = uvicorn.Server(uvicorn.Config(app.asgi, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def test_random_requests_get_documented_responses_and_no_server_error() -> None:
    # Imported here, because it takes half a second, and the other tests do not need it.
    import requests
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    expected: list[Any] = [
        not_a_server_error,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.status_code_conformance,
    ]
    with served() as url, requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {TOKEN}"
        document = session.get(f"{url}/openapi.json", timeout=60).json()
        schema = schemathesis.openapi.from_dict(document).exclude(path=ENDLESS)
        tried = 0
        operations: Any = [each.ok() for each in cast(Any, schema.get_all_operations())]
        for operation in operations:

            @settings(max_examples=scaled(200, least=4), database=None)
            @given(case=operation.as_strategy())
            def check(case: Any) -> None:
                nonlocal tried
                tried += 1
                response = case.call(base_url=url, session=session, allow_redirects=False)
                case.validate_response(response, checks=expected)

            check()
        assert tried >= len(document["paths"]) - len(ENDLESS)
        assert session.get(f"{url}/v1/health", timeout=60).status_code == 200
