"""SeaweedFS on this machine: an object store with identities and their rights. `make fleet` installs it."""

import json
import subprocess
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from benchmarks.acceptance.fleet.installed import NotInstalled
from benchmarks.acceptance.fleet.routing_proxies import FLEET
from penstock.train.parallel.launch import free_port

WEED = FLEET / "bin" / "weed"
START_S = 60
BUCKET = "bucket"
# The rights of each identity, in SeaweedFS's words.
WRITER, READER, NOBODY = "writer", "reader", "nobody"
_RIGHTS = {WRITER: ["Admin"], READER: [f"Read:{BUCKET}", f"List:{BUCKET}"], NOBODY: ["Read:another"]}
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


@final
class SeaweedFS:
    """A master, a volume server, a filer and its S3, in one process, with one bucket.

    Args:
        folder: A folder of its own.

    Raises:
        NotInstalled: It is not.
    """

    def __init__(self, folder: Path) -> None:
        if not WEED.exists():
            raise NotInstalled(f"SeaweedFS is not installed: there is no {WEED}; 'make fleet' installs it.")
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": _secret(name)}], "actions": rights}
            for name, rights in _RIGHTS.items()
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        options = {name: free_port() for name in (*_PORTS, "s3.port.grpc")}
        options |= {"s3.port": port, "s3.port.iceberg": 0, "s3.port.lance": 0, "s3.config": folder / "s3.json"}
        options |= {"ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": folder, "volume.max": 20}
        options |= {"master.volumeSizeLimitMB": 64}
        command = [WEED, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())]
        self._log = folder / "weed.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        self._begin()

    def environment(self, identity: str) -> dict[str, str]:
        """Variables with which S3 clients find it, as one identity."""
        return {
            "AWS_ACCESS_KEY_ID": identity,
            "AWS_SECRET_ACCESS_KEY": _secret(identity),
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self._url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, objects: Iterable[tuple[str, bytes]]) -> None:
        """Write objects into the bucket, by name."""
        for name, content in objects:
            self.system.pipe_file(f"{BUCKET}/{name}", content)

    def names(self, below: str = "") -> list[str]:
        """The objects of the bucket below a name."""
        system = self.system
        system.invalidate_cache()
        # A folder that is still empty is listed too.
        found = [name.removeprefix(f"{BUCKET}/") for name in system.find(f"{BUCKET}/{below}")]
        return [name for name in found if name != below]

    def read(self, below: str) -> dict[str, bytes]:
        """The content of these, by name."""
        return {name: self.system.cat_file(f"{BUCKET}/{name}") for name in self.names(below)}

    @property
    def system(self) -> Any:
        """The file system of fsspec, for the identity that may do everything."""
        import s3fs

        return s3fs.S3FileSystem(
            key=WRITER,
            secret=_secret(WRITER),
            endpoint_url=self._url,
            client_kwargs={"region_name": "us-east-1"},
            config_kwargs={"retries": {"max_attempts": 1}},
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _begin(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                # Its parts find one another after the first of them answers.
                self.system.mkdir(BUCKET)
                self.put([("first", b"first")])
            except Exception as error:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > deadline_s:
                    self.close()
                    raise AssertionError(f"SeaweedFS did not start: {self._log.read_text()[-2000:]}") from error
                time.sleep(0.3)
            else:
                return


def _secret(identity: str) -> str:
    return f"{identity}-secret"


@contextmanager
def seaweedfs(folder: Path) -> Generator[SeaweedFS]:
    """SeaweedFS, while the context is open.

    Raises:
        NotInstalled: It is not.
    """
    store = SeaweedFS(folder)
    try:
        yield store
    finally:
        store.close()
