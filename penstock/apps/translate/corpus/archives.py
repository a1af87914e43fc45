"""Files inside Debian packages, read without unpacking them to a folder."""

import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.core.errors import TrainError


def files_in(package: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Read files of a .deb, by `dpkg-deb`.

    Args:
        package: The .deb file.
        wanted: Chooses files by their path in the package, such as `usr/share/doc/fortunes/copyright`.

    Yields:
        The path and the content of each file, in the package's order.

    Raises:
        TrainError: The package cannot be read.
    """
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    path = member.name.removeprefix("./")
                    if member.isfile() and wanted(path):
                        content = archive.extractfile(member)
                        assert content is not None, path
                        yield path, content.read()
            # dpkg-deb would fail if the padding at the end of the archive were left unread.
            process.stdout.read()
        except (tarfile.TarError, EOFError) as error:
            raise TrainError(
                f"{package} cannot be read ({error}); download it again with 'apt-get download'."
            ) from None
    if process.returncode:
        raise TrainError(f"{package} is no Debian package; download it again with 'apt-get download'.")
