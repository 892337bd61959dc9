"""Fixtures of the native core's own tests. Where it was not built they are skipped."""

from __future__ import annotations

from types import ModuleType

import pytest

from headrace.backends import native as face


@pytest.fixture(scope="session")
def native() -> ModuleType:
    module, reason = face.native()
    if module is None:
        pytest.skip(f"no native core: {reason}")
    return module
