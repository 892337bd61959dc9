"""`python probe.py [PATH]` fails unless the server on port 8000 of this machine answers a probe with 200.

PATH is /health/serving by default. The file that HEADRACE_PROBE_KEY_FILE names holds the key.
"""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path


def status(path: str, port: int = 8000, key_file: str | None = None) -> int:
    """The status of a GET; 0 if nothing answers."""
    headers = {"Authorization": f"Bearer {Path(key_file).read_text().strip()}"} if key_file else {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    found = status(*(sys.argv[1:2] or ["/health/serving"]), key_file=os.environ.get("HEADRACE_PROBE_KEY_FILE"))
    print(found)
    sys.exit(found != 200)
