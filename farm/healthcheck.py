"""`python -m farm.healthcheck URL`: exit 0 if a role says that it is ready.

For health checks of containers, so it imports next to nothing.
"""

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def is_healthy(url: str) -> bool:
    """Ask once, directly: no proxy of the environment stands between a process and its own host."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    sys.exit(0 if is_healthy(sys.argv[1]) else 1)
