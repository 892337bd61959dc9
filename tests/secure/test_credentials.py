"""The files of a certificate, its key, a CA and a secret: what is wrong with one is named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.remote import files

from headrace.protocol.errors import RequestError
from headrace.secure.credentials import Credentials


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        (0, b"short", "fleet_secret_file"),
        (0, None, "fleet_secret_file"),
        (1, b"no certificate", "tls_cert"),
        (2, b"no key", "tls_key"),
        (3, b"no ca", "tls_ca"),
    ],
)
def test_files_at_fault_are_named(place: int, content: bytes | None, message: str, tmp_path: Path) -> None:
    names = [str(files() / name) for name in ("fleet.secret", "front.pem", "front.key", "ca.pem")]
    names[place] = str(tmp_path / "file")
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(RequestError, match=message):
        Credentials.read(*names, is_server=False)


def test_a_key_with_a_password_is_refused_and_not_asked_for(tmp_path: Path) -> None:
    command = ["openssl", "ec", "-in", str(files() / "front.key"), "-aes128", "-passout", "pass:x", "-out", "k.key"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    names = [
        str(files() / "fleet.secret"),
        str(files() / "front.pem"),
        str(tmp_path / "k.key"),
        str(files() / "ca.pem"),
    ]
    with pytest.raises(RequestError, match="without a password"):
        Credentials.read(*names, is_server=False)


def test_a_secret_that_others_may_read_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    path.write_text("s" * 64)
    path.chmod(0o644)
    Credentials.read(
        str(path), *(str(files() / name) for name in ("front.pem", "front.key", "ca.pem")), is_server=False
    )
    assert "chmod 600" in caplog.text
    assert "sss" not in caplog.text
