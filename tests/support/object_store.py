"""A local object store that speaks S3 over HTTP, as a process that can be stopped, killed and slowed."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import final

from tests.support.serving import free_port

START_S = 120
_KEY = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


@final
class ObjectStore:
    """A server of moto.

    Attributes:
        environment: Variables with which S3 clients find it.
    """

    def __init__(self) -> None:
        self._port = free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self._url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self.process = subprocess.Popen(
            command, env=os.environ | self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                self.request("GET", "")
            except urllib.error.URLError:
                assert self.process.poll() is None, "moto ended"
                assert time.monotonic() < deadline_s, "moto did not start"
                time.sleep(0.05)
            else:
                return

    def request(self, method: str, name: str, data: bytes | None = None) -> bytes:
        """Send a request about a bucket or an object, `bucket/name`."""
        headers = {"Authorization": _KEY, "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
        headers["Content-Type"] = "application/octet-stream"
        asked = urllib.request.Request(f"{self._url}/{name}", data=data, headers=headers, method=method)
        with urllib.request.urlopen(asked, timeout=10) as reply:
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
