"""Install the parts of packed synthesizers: `sh install.sh [ROOT]`, as root, beside the files part-N.tar.xz.

`pack_synthesizers` writes this program into install.sh. It needs Python 3.9 or later and ldconfig. A file that is there
already is left alone; one is there only once it is written whole. A library that the dynamic linker finds already is
left out: the system's own may be newer.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

# Where a part has libraries, and where they are installed.
LIBRARIES, OWN_LIBRARIES = "lib/", Path("opt/penstock-speech-libraries")
# The last of its folder, so that the libraries of the system come first.
LINKER_FILE = Path("etc/ld.so.conf.d/zz-penstock-speech.conf")
# Slices of a large file, which may be in several parts.
SLICE = re.compile(r"(?P<name>.+)\.slice-(?P<number>\d+)-of-(?P<count>\d+)")
# A line of `ldconfig -p`.
LISTED = re.compile(r"\s*(?P<name>\S+) \([^)]*x86-64[^)]*\) => (?P<path>/\S+)")


def install(folder: Path, root: Path, known: frozenset[str]) -> list[str]:
    """Unpack the parts of a folder; return the files that lack a slice. A later call with its part completes them.

    Args:
        folder: The folder of part-1.tar.xz, part-2.tar.xz and so on. Some parts may be missing.
        root: Folder to install into.
        known: Names of the libraries that the system has.
    """
    sliced: dict[Path, list[Path]] = {}
    for part in sorted(folder.glob("part-*.tar.xz"), key=lambda part: int(re.sub(r"\D", "", part.name.split(".")[0]))):
        with tarfile.open(part) as archive:
            for member in archive:
                if member.name.startswith(LIBRARIES):
                    name = member.name.removeprefix(LIBRARIES)
                    if name not in known:
                        extract(archive, member, root / OWN_LIBRARIES / name)
                elif found := SLICE.fullmatch(member.name):
                    whole = root / found["name"]
                    slices = [whole.with_name(f"{whole.name}.slice-{at}") for at in range(int(found["count"]))]
                    sliced[whole] = slices
                    if not whole.exists():
                        extract(archive, member, slices[int(found["number"])])
                else:
                    extract(archive, member, root / member.name)
    return [str(whole) for whole, slices in sliced.items() if not whole.exists() and not join(slices, whole)]


def extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write a file of an archive, unless it is there."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    content = archive.extractfile(member)
    assert content is not None, member.name
    partial = target.with_name(f"{target.name}.partial")
    with content, partial.open("wb") as file:
        shutil.copyfileobj(content, file)
    partial.chmod(member.mode)
    partial.replace(target)


def join(slices: list[Path], whole: Path) -> bool:
    """Join the slices of a file and remove them, if all are there."""
    if not all(piece.exists() for piece in slices):
        return False
    partial = whole.with_name(f"{whole.name}.partial")
    with partial.open("wb") as file:
        for piece in slices:
            file.write(piece.read_bytes())
    partial.chmod(slices[0].stat().st_mode)
    partial.replace(whole)
    for piece in slices:
        piece.unlink()
    return True


def known_libraries(root: Path) -> frozenset[str]:
    """Return the names of the libraries that the dynamic linker finds in a root."""
    done = subprocess.run(["ldconfig", "-r", str(root), "-p"], capture_output=True, text=True)
    return listed_libraries(done.stdout, root)


def listed_libraries(listed: str, root: Path) -> frozenset[str]:
    """Return the names of the libraries for x86-64 that `ldconfig -p` lists and that are still there."""
    found = (LISTED.match(line) for line in listed.splitlines())
    return frozenset(
        each["name"] for each in found if each is not None and os.path.lexists(root / each["path"].lstrip("/"))
    )


def main() -> None:
    """Install the parts beside this program, and refresh the dynamic linker's cache."""
    folder, root = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "/")
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    (root / OWN_LIBRARIES).mkdir(parents=True, exist_ok=True)
    (root / LINKER_FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / LINKER_FILE).write_text(f"/{OWN_LIBRARIES}\n")
    for file in install(folder, root, known_libraries(root)):
        print(f"{file} is incomplete: install the parts that are missing.")
    subprocess.run(["ldconfig", "-r", str(root)], check=True)


if __name__ == "__main__":
    main()
