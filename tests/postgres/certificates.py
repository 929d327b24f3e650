"""Certificates made for a test, by the openssl command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

__all__ = ["Authority", "Certificate"]


class Certificate(NamedTuple):
    """A certificate, and its key."""

    certificate: Path
    key: Path

    def give(self, directory: Path, name: str) -> None:
        """Install certificate and key as those of a server."""
        owner = directory.stat()
        for path, ending in ((self.certificate, "crt"), (self.key, "key")):
            copy = directory / f"{name}.{ending}"
            copy.write_bytes(path.read_bytes())
            copy.chmod(0o600)
            os.chown(copy, owner.st_uid, owner.st_gid)


class Authority:
    """A certificate authority."""

    def __init__(self, openssl: str, directory: Path, name: str) -> None:
        self._openssl = openssl
        self._directory = directory
        self._name = name
        self._own = self._make(name, f"/CN={name}")

    @property
    def root(self) -> Path:
        """The root certificate."""
        return self._own.certificate

    def sign(self, subject: str, *names: str) -> Certificate:
        """Sign a certificate for a subject; for a server, with its host names."""
        listed = ",".join(f"DNS:{name}" for name in names)
        extra = ["-addext", f"subjectAltName={listed}"] if listed else []
        signed = ["-CA", str(self.root), "-CAkey", str(self._own.key)]
        signed += ["-addext", "basicConstraints=critical,CA:FALSE"]
        return self._make(f"{self._name}-{subject}", f"/CN={subject}", *signed, *extra)

    def _make(self, name: str, subject: str, *more: str) -> Certificate:
        made = Certificate(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        command = [self._openssl, "req", "-x509", "-newkey", "ec"]
        command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
        command += ["-subj", subject, "-out", str(made.certificate), "-keyout", str(made.key)]
        subprocess.run([*command, *more], check=True, capture_output=True)
        made.key.chmod(0o600)
        return made
