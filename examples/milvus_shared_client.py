"""Milvus clients that share a connection, and a call that waits for the end of an outage.

The server is Milvus Lite, in this process; a proxy in front of it causes the outage.

Expected output:

    2 clients, 1 connection
    the nearest: 3
    the server cannot be reached for a second
    1 row written after the outage, over connection 2
    1 client, 1 connection
"""

import tempfile
import threading
from pathlib import Path
from typing import Any

from moored.rpc.milvus import MilvusClient, MilvusManager, milvus_config
from moored.testing import FaultProxy


def row(number: int) -> dict[str, Any]:
    return {"id": number, "vector": [float(number), 1.0]}


def show(manager: MilvusManager) -> None:
    (line,) = manager.get_stats()["connections"]
    users = line["client_count"]
    print(f"{users} client{'s' if users > 1 else ''}, 1 connection")


def main(folder: Path) -> None:
    server = milvus_config(str(folder / "books.db"))
    host, _, port = server.address.partition(":")
    with FaultProxy(host, int(port)).in_thread() as proxy, MilvusManager() as manager:
        uri = f"http://127.0.0.1:{proxy.port}"
        writer = MilvusClient(uri, manager=manager)
        reader = MilvusClient(uri, manager=manager)
        show(manager)

        writer.create_collection("books", dimension=2, metric_type="L2")
        writer.insert("books", [row(number) for number in range(10)])
        (found,) = reader.search("books", [row(3)["vector"]], limit=1)
        print("the nearest:", found[0]["id"])

        print("the server cannot be reached for a second")
        proxy.refuse()
        proxy.reset()
        threading.Timer(1.0, proxy.heal).start()
        result = writer.upsert("books", [row(10)], timeout=30)
        (line,) = manager.get_stats()["connections"]
        print(
            f"{result['upsert_count']} row written after the outage, over connection",
            line["generation"],
        )

        reader.close()
        show(manager)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        main(Path(folder))
