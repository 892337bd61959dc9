"""The proofs that two sides show each other: certificates under one CA, and the fleet's secret.

Reads the files that the command line names. Knows no connections. Called by `cli` and `engine.ranks`; `handshake` uses
the result.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from headrace.protocol.errors import RequestError

logger = logging.getLogger("headrace.engine")

MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096


@dataclass(frozen=True)
class Credentials:
    """The secret, the SHA-256 digest of one's own certificate (DER), and the settings of TLS with it."""

    secret: bytes
    digest: bytes
    context: ssl.SSLContext

    @classmethod
    def read(cls, secret_file: str, cert: str, key: str, ca: str, *, is_server: bool) -> Credentials:
        """Read the files. The other side must have a certificate under `ca`, a server's for the name by which it is
        called.

        Raises `RequestError`, which names the flag and the fault of its file.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if is_server:
            # Each connection shows its certificate: none is resumed.
            context.num_tickets = 0
        try:
            context.load_verify_locations(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise RequestError("tls_ca", ca, f"a PEM file of certificates ({_why(error)})") from error
        try:
            # OpenSSL would read a key's password from the terminal.
            context.load_cert_chain(cert, key, password="")
            digest = certificate_digest(ssl.PEM_cert_to_DER_cert(_first_certificate(Path(cert).read_text("ascii"))))
        except (OSError, ValueError) as error:
            bound = f"PEM files of a certificate and of its key without a password ({_why(error)})"
            raise RequestError("tls_cert, tls_key", f"{cert}, {key}", bound) from error
        return cls(_secret(secret_file), digest, context)


def certificate_digest(der: bytes) -> bytes:
    """Return the SHA-256 digest of a certificate."""
    return hashlib.sha256(der).digest()


def _first_certificate(text: str) -> str:
    """Return the first certificate of a PEM file, which is one's own. Raises ValueError."""
    end = "-----END CERTIFICATE-----"
    begin = text.index("-----BEGIN CERTIFICATE-----")
    return text[begin : text.index(end, begin) + len(end)]


def _secret(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
            is_open = bool(stat.S_IMODE(Path(name).stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO))
    except OSError as error:
        raise RequestError("fleet_secret_file", name, f"a file that can be read ({_why(error)})") from error
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        bound = f"a file of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, such as `openssl rand -hex 32` prints"
        raise RequestError("fleet_secret_file", f"{len(secret)} bytes", bound)
    if is_open:
        logger.warning("other users of this machine may read the fleet's secret: chmod 600 %s", name)
    return secret


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
