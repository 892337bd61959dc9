"""`python probe.py [PATH]` fails unless the server on port 8000 of this machine answers a probe with 200.

PATH is /health/serving by default. The key is in the file that HEADRACE_PROBE_KEY_FILE names, or the first in
HEADRACE_API_KEY. Without one, a server that asks for a key is probed with /health/live, which needs none.
"""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path


def status(path: str, port: int = 8000, key: str | None = None) -> int:
    """The status of a GET; 0 if nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def probe(path: str, port: int = 8000) -> int:
    """The status of PATH with the key of the environment."""
    file = os.environ.get("HEADRACE_PROBE_KEY_FILE")
    keys = (Path(file).read_text() if file else os.environ.get("HEADRACE_API_KEY", "")).split()
    if keys:
        return status(path, port, keys[0])
    result = status(path, port)
    return status("/health/live", port) if result == 401 else result


if __name__ == "__main__":
    result = probe(*(sys.argv[1:2] or ["/health/serving"]))
    print(result)
    sys.exit(result != 200)
