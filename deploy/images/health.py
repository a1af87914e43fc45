"""Exit with status 0 if the server of this container is ready, else with 1 and the reason.

PENSTOCK_HEALTH_URL is the address to ask, if it is not http://127.0.0.1:8000/v2/health/ready.
"""

import os
import sys
import urllib.error
import urllib.request

URL = os.environ.get("PENSTOCK_HEALTH_URL", "http://127.0.0.1:8000/v2/health/ready")
TIMEOUT_S = 4

try:
    with urllib.request.urlopen(URL, timeout=TIMEOUT_S):
        pass
except urllib.error.HTTPError as error:
    sys.exit(f"{error.code}: {error.read(1000).decode(errors='replace')}")
except OSError as error:
    sys.exit(f"{URL}: {error}")
