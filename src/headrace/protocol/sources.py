"""A digest of headrace's sources, for data that only processes of the same version may share."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def digest_of_sources() -> str:
    """Return a digest of all Python files of the package."""
    folder = Path(__file__).parents[1]
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        hasher.update(hashlib.sha256(str(path.relative_to(folder)).encode()).digest())
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()[:16]
