"""Run the service on a PostgreSQL of its own, with its data in ./data: `python dev.py`."""

import os
import secrets
import signal
from pathlib import Path

import uvicorn

from moored.embedded import SyncEmbeddedPostgres

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops PostgreSQL, as Ctrl-C does
    port = int(os.environ.get("PORT", "8000"))
    token = os.environ.setdefault("MOORED_ADMIN_TOKEN", secrets.token_hex(16))
    Path("data").mkdir(exist_ok=True)
    Path("data/.gitignore").write_text("*\n")
    with SyncEmbeddedPostgres("data/postgres") as server:
        os.environ["DATABASE_URL"] = server.url
        os.environ["MOORED_STATE_DIR"] = "data/streams"
        print(f"the page of the service: http://127.0.0.1:{port}/moored/?token={token}", flush=True)
        uvicorn.run("service:api", port=port)
