"""The real servers that the tests use.

`tools/servers.py install` installs missing servers if it can (as root, with apt), and otherwise
prints which tests cannot run and why. With CI=true a missing server is a failure. Tests look up a
binary with `find()`.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

POLICY = Path("/usr/sbin/policy-rc.d")


@dataclass(frozen=True)
class Server:
    """A server: its Debian package, its binary, and what is tested with it."""

    name: str
    package: str
    binary: str
    purpose: str


SERVERS = (
    Server(
        "postgres",
        "postgresql",
        "/usr/lib/postgresql/*/bin/postgres",
        "an installed PostgreSQL, by its bin directory",
    ),
    Server("chromium", "chromium", "chromium", "the live page, in a real browser"),
    Server("redis", "redis-server", "redis-server", "leases and rate limits in Redis"),
    Server("pgbouncer", "pgbouncer", "/usr/sbin/pgbouncer", "PostgreSQL behind PgBouncer"),
    Server("openssl", "openssl", "openssl", "TLS, with certificates made for the test"),
    Server("mosquitto", "mosquitto", "/usr/sbin/mosquitto", "sessions over MQTT"),
    Server("nginx", "nginx-light", "/usr/sbin/nginx", "streams to browsers behind a proxy"),
    Server("ejabberd", "ejabberd", "/usr/sbin/ejabberdctl", "sessions over MQTT, a second broker"),
)


def find(name: str) -> str | None:
    """Return the path of a server's binary, or None if it is not installed."""
    server = next(s for s in SERVERS if s.name == name)
    if "/" in server.binary:
        return max(glob.glob(server.binary), default=None)
    return shutil.which(server.binary)


def missing() -> list[Server]:
    """Return the servers that are not installed."""
    return [s for s in SERVERS if find(s.name) is None]


def install(servers: list[Server]) -> None:
    """Install packages without starting their daemons: the tests start their own."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    guard = not POLICY.exists()
    if guard:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
        packages = [s.package for s in servers]
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    finally:
        if guard:
            POLICY.unlink()


def main() -> int:
    """Install missing servers, then print those that are still missing."""
    if sys.argv[1:] not in ([], ["install"]):
        print("usage: tools/servers.py [install]", file=sys.stderr)
        return 2
    wanted = missing()
    if wanted and sys.argv[1:] == ["install"] and os.geteuid() == 0 and shutil.which("apt-get"):
        names = ", ".join(s.package for s in wanted)
        print(f"installing the servers that the tests use: {names}", flush=True)
        try:
            install(wanted)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"moored: the packages could not be installed: {error}", file=sys.stderr)
        wanted = missing()
    for server in wanted:
        print(
            f"moored: {server.name} is not installed, so the tests of {server.purpose} "
            f"cannot run (as root: apt-get install {server.package})",
            file=sys.stderr,
        )
    return 1 if wanted and os.environ.get("CI") == "true" else 0


if __name__ == "__main__":
    sys.exit(main())
