"""A multipart/form-data body taken apart (RFC 7578): fields by name, and the one file.

The body was read whole, within limits, before it comes here. Knows no route; called by `serve.apis.openai.files`.
"""

from __future__ import annotations

import re
from email.message import Message
from typing import NamedTuple

from headrace.protocol.errors import RequestError

MAX_PARTS = 32
MAX_FIELD_BYTES = 4096
MAX_HEADER_BYTES = 4096


class Upload(NamedTuple):
    """A part with a file name."""

    filename: str
    content: bytes


def parse_form(content_type: str, body: bytes) -> tuple[dict[str, str], dict[str, Upload]]:
    """Text fields and uploads by name. Raises `RequestError`."""
    header = Message()
    header["content-type"] = content_type[:1024]
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > 200:
        raise RequestError("body", content_type[:80], "multipart/form-data with a boundary")
    try:
        mark = b"\r\n--" + boundary.encode("ascii")
    except UnicodeEncodeError as error:
        raise RequestError("body", boundary, "multipart/form-data with an ASCII boundary") from error
    pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 2)
    # What follows the last boundary begins with two dashes; what comes before the first one is nobody's.
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise RequestError(
            "body", f"{len(pieces) - 1} boundaries", f"a whole multipart body of at most {MAX_PARTS} parts"
        )
    fields: dict[str, str] = {}
    uploads: dict[str, Upload] = {}
    for piece in pieces[1:-1]:
        name, filename, content = _part(piece)
        if name in fields or name in uploads:
            raise RequestError(name, "given twice", "given once")
        if filename is not None:
            uploads[name] = Upload(filename, content)
            continue
        if len(content) > MAX_FIELD_BYTES:
            raise RequestError(name, f"{len(content)} bytes", f"at most {MAX_FIELD_BYTES} bytes")
        try:
            fields[name] = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(name, content[:40], "UTF-8 text") from error
    return fields, uploads


def _part(piece: bytes) -> tuple[str, str | None, bytes]:
    """Name, file name and content of one part."""
    head, found, content = piece.partition(b"\r\n\r\n")
    if not found or not head.startswith(b"\r\n") or len(head) > MAX_HEADER_BYTES:
        raise RequestError("body", head[:40], "parts with headers, an empty line and content")
    disposition = ""
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            disposition = value.decode("utf-8", "replace").strip()
    given = {key.lower(): text for key, text in re.findall(r';\s*([\w*-]+)="((?:\\.|[^"\\])*)"', disposition)}
    given |= {key.lower(): text for key, text in re.findall(r";\s*([\w*-]+)=([^\s\";]+)", disposition)}
    if not disposition.lower().startswith("form-data") or not given.get("name") or len(given["name"]) > 80:
        raise RequestError("body", disposition[:80], "form-data parts with a name")
    return given["name"], given.get("filename"), content
