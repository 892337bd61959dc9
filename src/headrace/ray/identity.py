"""`Identity`: a certificate and the secret of a deployment, by which an actor proves itself. The files are made once,
kept in a folder, and handed to the actors.

The deployment's own CA signs one certificate for all engines and one for the front; then its key is dropped, so that no
third one can be made. All engines have the same name in their certificate, since their hosts are not known yet; the CA
signs for this deployment alone. Called by `cli.deploy` and by the actors.
"""

from __future__ import annotations

import datetime
import os
import secrets
import tempfile
from pathlib import Path

import msgspec

from headrace.protocol.errors import RequestError
from headrace.secure.credentials import Credentials

ENGINE_NAME = "engine.headrace.internal"
"""The name in the certificate of every engine of a deployment."""
YEARS = 10
FILES = ("fleet.secret", "ca.pem", "engine.pem", "engine.key", "front.pem", "front.key")


class Identity(msgspec.Struct, frozen=True):
    """The contents of one actor's files, or, if these are empty, the `folder` of the files on its host. `role` is
    engine or front."""

    role: str
    folder: str
    secret: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""

    def __repr__(self) -> str:
        return f"Identity({self.role})"

    def credentials(self) -> Credentials:
        """Return the credentials that `fleet.remote` takes. Raises `RequestError` for files that are not valid."""
        if not self.secret:
            return _read(Path(self.folder), self.role)
        # Python's ssl reads keys from files only.
        with tempfile.TemporaryDirectory(prefix="headrace-") as name:
            folder = Path(name)
            contents = (self.secret, self.ca, self.cert, self.key)
            for file, text in zip(_names(self.role), contents, strict=True):
                _write(folder / file, text.encode())
            return _read(folder, self.role)


def identity_of(folder: Path, role: str, is_sent: bool) -> Identity:
    """Return the identity in a folder; `is_sent`: with the contents of its files. Raises `RequestError`."""
    _read(folder, role)
    if not is_sent:
        return Identity(role, str(folder))
    return Identity(role, str(folder), *(_text(folder / _names(role)[at]) for at in (0, 2, 3, 1)))


def make(folder: Path) -> None:
    """Make the files of a new deployment in `folder`, for this user alone.

    Raises `RequestError` if there are some already, if it cannot be written, or without the library `cryptography`.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        bound = "a folder with " + ", ".join(FILES) + " (howto-scale.md), or: pip install cryptography"
        raise RequestError("credentials", str(folder), bound) from error

    now = datetime.datetime.now(datetime.UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def pem(certificate: x509.Certificate) -> bytes:
        text: bytes = certificate.public_bytes(serialization.Encoding.PEM)
        return text

    authority = ec.generate_private_key(ec.SECP256R1())

    def certificate(role: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
        is_authority = role == "ca"
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(f"headrace {role}"))
            .issuer_name(name("headrace ca"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
            .add_extension(
                x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        )
        if role == "engine":
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(ENGINE_NAME)]), critical=False)
        return builder.sign(authority, hashes.SHA256())

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        _write(folder / "fleet.secret", secrets.token_hex(32).encode() + b"\n")
        _write(folder / "ca.pem", pem(certificate("ca", authority)))
        for role in ("engine", "front"):
            key = ec.generate_private_key(ec.SECP256R1())
            form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            _write(folder / f"{role}.key", key.private_bytes(serialization.Encoding.PEM, *form))
            _write(folder / f"{role}.pem", pem(certificate(role, key)))
    except OSError as error:
        raise RequestError("credentials", str(folder), f"a new folder of this user ({error.strerror})") from error


def _names(role: str) -> tuple[str, str, str, str]:
    return "fleet.secret", "ca.pem", f"{role}.pem", f"{role}.key"


def _read(folder: Path, role: str) -> Credentials:
    secret, ca, cert, key = (str(folder / name) for name in _names(role))
    return Credentials.read(secret, cert, key, ca, is_server=role == "engine")


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii")


def _write(path: Path, content: bytes) -> None:
    """Write a new file that this user alone may read. Raises OSError, also if there is one."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
