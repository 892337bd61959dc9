"""Multipart/form-data bodies (RFC 7578): fields and uploads by name, parsed by python-multipart.

The whole body is in memory, within the limits of `serve.gates.limits`; python-multipart bounds the boundary and the
headers, this module the parts and the fields. Knows no route; called by `serve.apis.openai.files`.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from headrace.protocol.errors import RequestError

MAX_PARTS = 32
MAX_FIELD_BYTES = 4096
MAX_NAME = 80

# The reply names the fault of the body: the log need not repeat it.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class UploadedPart(NamedTuple):
    """A part with a file name."""

    filename: str
    content: bytes


FormData = tuple[dict[str, str], dict[str, UploadedPart]]
"""Text fields and uploads, by name."""


def parse_form(content_type: str, body: bytes) -> FormData:
    """Return text fields and uploads by name. Raises `RequestError`."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError("body", content_type[:80], "multipart/form-data with a boundary")
    # Checked first, because the parser reads what follows a boundary byte by byte: 64 MiB of padding take seconds.
    mark = b"\r\n--" + boundary
    num_parts = body.count(mark)
    if num_parts > MAX_PARTS or num_parts != body.count(mark + b"\r\n") + body.count(mark + b"--"):
        raise RequestError("body", f"{num_parts} boundaries", f"at most {MAX_PARTS} parts between whole boundaries")
    parts: list[Field | File] = []
    ends: list[bool] = []
    try:
        form = FormParser(
            "multipart/form-data",
            on_field=parts.append,
            on_file=parts.append,
            on_end=lambda: ends.append(True),
            boundary=boundary,
            config={"MAX_MEMORY_FILE_SIZE": len(body)},
        )
        form.write(body[max(0, body.find(mark[2:])) :])  # without the preamble
        if not ends:
            raise FormParserError("no boundary at the end")
    except FormParserError as error:
        raise RequestError("body", str(error), "whole multipart/form-data, each part with a name") from error
    fields: dict[str, str] = {}
    uploads: dict[str, UploadedPart] = {}
    for part in parts:
        name = (part.field_name or b"").decode("utf-8", "replace")
        if not 0 < len(name) <= MAX_NAME or name in fields or name in uploads:
            raise RequestError("body", name, f"parts with distinct names of 1 to {MAX_NAME} characters")
        if isinstance(part, File):
            part.file_object.seek(0)
            uploads[name] = UploadedPart((part.file_name or b"").decode("utf-8", "replace"), part.file_object.read())
            continue
        value = part.value or b""
        if len(value) > MAX_FIELD_BYTES:
            raise RequestError(name, f"{len(value)} bytes", f"at most {MAX_FIELD_BYTES} bytes")
        try:
            fields[name] = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(name, value[:40], "UTF-8 text") from error
    return fields, uploads
