"""A local object store that speaks S3 over HTTP, as a process that can be stopped, killed and slowed."""

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import final

START_S = 120
ANNOUNCEMENT = re.compile(rb"Running on (http://127\.0\.0\.1:\d+)\s")
_KEY = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


@final
class ObjectStore:
    """A server of moto.

    Attributes:
        environment: Variables with which S3 clients find it.
    """

    def __init__(self) -> None:
        # A port of its own choice, which it prints: no other process can have it.
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        environment = os.environ | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        with tempfile.TemporaryFile() as log:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
            deadline_s = time.monotonic() + START_S
            while (found := ANNOUNCEMENT.search(os.pread(log.fileno(), 1 << 16, 0))) is None:
                assert self.process.poll() is None, "moto ended"
                assert time.monotonic() < deadline_s, "moto did not start"
                time.sleep(0.05)
        self._url = found[1].decode()
        self.environment = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self._url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def request(self, method: str, name: str, data: bytes | None = None) -> bytes:
        """Send a request about a bucket or an object, `bucket/name`."""
        headers = {"Authorization": _KEY, "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
        headers["Content-Type"] = "application/octet-stream"
        asked = urllib.request.Request(f"{self._url}/{name}", data=data, headers=headers, method=method)
        with urllib.request.urlopen(asked, timeout=START_S) as reply:
            return reply.read()

    def names(self, bucket: str) -> list[str]:
        """The objects of a bucket."""
        text = self.request("GET", f"{bucket}?list-type=2").decode()
        return [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


@contextmanager
def object_store(*buckets: str) -> Generator[ObjectStore]:
    """An object store with buckets, while the context is open."""
    store = ObjectStore()
    try:
        for bucket in buckets:
            store.request("PUT", bucket)
        yield store
    finally:
        store.close()
