"""Certificates made by openssl, for servers of this machine and their clients."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NEW = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


@functools.cache
def certificates() -> Path:
    """A folder with a CA (ca.pem), the server's certificate for localhost and 127.0.0.1 (server.pem, server.key), the
    same with a password (locked.key: "open"), a client's (client.pem with its key), and a second CA's (other.pem,
    other.key). It goes with this process. Skips the test where openssl is missing."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tempfile.TemporaryDirectory(prefix="headrace-certificates-")
    certificates.folder = folder  # type: ignore[attr-defined]
    place = Path(folder.name)
    (place / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")

    def run(command: str) -> None:
        subprocess.run(command.split(), cwd=place, check=True, capture_output=True)

    for name in ("ca", "other"):
        run(f"{NEW} -x509 -days 30 -subj /CN=headrace-{name} -keyout {name}.key -out {name}.pem")
    for name in ("server", "client"):
        run(f"{NEW} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        signed = f"openssl x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30"
        run(f"{signed} -extfile names -out {name}.pem")
    run("openssl ec -in server.key -aes256 -passout pass:open -out locked.key")
    (place / "client.pem").write_text((place / "client.pem").read_text() + (place / "client.key").read_text())
    return place
