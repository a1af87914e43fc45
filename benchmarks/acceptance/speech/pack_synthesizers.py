"""Pack the speech synthesizers of `many_voices` for a machine that cannot install packages.

    python -m benchmarks.acceptance.speech.pack_synthesizers FOLDER [--without NAME ...]

writes FOLDER/part-1.tar.xz and so on, each at most 24 MiB, and FOLDER/install.sh. Copy them to a Linux machine with
x86-64 and Python 3.9 or later, and run `sh install.sh` there as root. Part 1 is always needed: it has espeak-ng and the
libraries that several synthesizers need. The others may be left out; the largest voices of MBROLA come last. WordNet is
installed as /usr/share/wordnet, the lines of `package_lines` as /usr/share/penstock-speech/lines.txt.

The synthesizers come from Debian's archive areas main, contrib and non-free. apt has a configuration of its own for
this, so that the system's stays as it is. Run it on a Debian whose glibc is no newer than the other machine's, such as
bookworm. For the licenses of the voices see `penstock/apps/speech/README.md`.
"""

import argparse
import io
import lzma
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.acceptance.speech import install_synthesizers
from benchmarks.acceptance.speech.install_synthesizers import LIBRARIES
from penstock.apps.speech import many_voices
from penstock.apps.speech.package_lines import HELP, PROMPTS, package_lines
from penstock.core.errors import BenchError, PenstockError

PART_BYTES = 24 << 20
AREAS = "main contrib non-free"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHITECTURE_LIBRARIES = "usr/lib/x86_64-linux-gnu"
ESPEAK_DATA = f"{ARCHITECTURE_LIBRARIES}/espeak-ng-data"
LINES = "usr/share/penstock-speech/lines.txt"
# glibc's own libraries are those of the other machine.
GLIBC = re.compile(r"(linux-vdso|ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libresolv)\.so\.\d")
LINKER = "ld-linux-x86-64.so.2"
LISTED_LIBRARY = re.compile(r"\s*(\S+) => (not found|/\S+)")
# Samples of 16 bits: differences of neighbours, then contexts of two bytes. A seventh smaller than without.
PLAIN: list[dict[str, Any]] = [{"id": lzma.FILTER_LZMA2, "preset": 9}]
SAMPLES: list[dict[str, Any]] = [
    {"id": lzma.FILTER_DELTA, "dist": 2},
    {"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1},
]
TAR_END = bytes(2 * tarfile.BLOCKSIZE)
INSTALL = """#!/bin/sh
exec python3 - "$(dirname "$0")" "$@" <<'END_OF_PROGRAM'
{program}END_OF_PROGRAM
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Files that belong together: a synthesizer, a voice of MBROLA, or texts.

    Args:
        name: For `--without`.
        packages: Debian's packages that have the files.
        files: Patterns of the files that are needed, relative to the root.
        programs: Those of the files that need shared libraries.
        samples: Whether the files are samples of 16 bits.
    """

    name: str
    packages: tuple[str, ...]
    files: tuple[str, ...]
    programs: tuple[str, ...] = ()
    samples: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A compressed piece of a part.

    Args:
        name: Name of the group.
        content: xz stream of a tar archive without its end.
    """

    name: str
    content: bytes


def groups() -> list[Group]:
    """List all groups in the order in which they are packed."""
    native, accented = many_voices.MBROLA["train"], many_voices.MBROLA_ACCENTED["train"]
    voices = [f"mb-{name}" for name in native] + [f"mb-{name}-en" for name in accented]
    festival = ("kdlpc16k", "kallpc16k", "rablpc16k", "us-slt-hts")
    rhvoice = sorted(name for table in (many_voices.RHVOICE, many_voices.RHVOICE_ACCENTED) for name in table["train"])
    return [
        Group(
            name="espeak-ng",
            packages=("espeak-ng",),
            files=(
                "usr/bin/espeak-ng",
                *(f"{ESPEAK_DATA}/{name}" for name in ("phondata", "phonindex", "phontab", "intonations", "en_dict")),
                f"{ESPEAK_DATA}/lang/gmw/en*",
                f"{ESPEAK_DATA}/voices/!v/*",
                f"{ESPEAK_DATA}/mbrola_ph/*",
                *(f"{ESPEAK_DATA}/voices/mb/{name}" for name in voices),
            ),
            programs=("usr/bin/espeak-ng",),
        ),
        Group(name="flite", packages=("flite",), files=("usr/bin/flite",), programs=("usr/bin/flite",)),
        Group(name="wordnet", packages=("wordnet-base",), files=("usr/share/wordnet/data.*",)),
        Group(name="lines", packages=(HELP, PROMPTS), files=(LINES,)),
        Group(
            name="pico",
            packages=("libttspico-utils",),
            files=("usr/bin/pico2wave", "usr/share/pico/lang/en-*"),
            programs=("usr/bin/pico2wave",),
        ),
        Group(
            name="festival",
            packages=("festival", *(f"festvox-{name}" for name in festival)),
            files=(
                "usr/bin/festival",
                "usr/share/festival/*.scm",
                "usr/share/festival/*.ngrambin",
                "usr/share/festival/*.gram",
                "usr/share/festival/dicts/*",
                "usr/share/festival/dicts/cmu/*",
                "usr/share/festival/dicts/oald/oald*",
                "usr/share/festival/voices/**/*",
            ),
            programs=("usr/bin/festival",),
        ),
        Group(
            name="rhvoice",
            packages=("librhvoice5", "rhvoice-english"),
            files=(
                f"{ARCHITECTURE_LIBRARIES}/{many_voices.RHVOICE_LIBRARY}",
                "usr/share/RHVoice/languages/English/**/*",
                # The voices' other quality, of 24 kHz, is not used.
                *(f"usr/share/RHVoice/voices/{name}/{files}" for name in rhvoice for files in ("*", "16000/**/*")),
            ),
            programs=(f"{ARCHITECTURE_LIBRARIES}/{many_voices.RHVOICE_LIBRARY}",),
        ),
        Group(name="mbrola", packages=("mbrola",), files=("usr/bin/mbrola",), programs=("usr/bin/mbrola",)),
        *(
            Group(
                name=f"mbrola-{name}",
                packages=(f"mbrola-{name}",),
                files=(f"usr/share/mbrola/{name}/{name}",),
                samples=True,
            )
            for name in (*native, *accented)
        ),
    ]


def chosen(among: Iterable[Group], without: Iterable[str]) -> list[Group]:
    """Leave out groups.

    Args:
        among: Groups.
        without: Names or patterns of names, such as `mbrola-*`.

    Raises:
        BenchError: There is no such group.
    """
    kept = list(among)
    for pattern in without:
        left = [group for group in kept if not fnmatchcase(group.name, pattern)]
        if len(left) == len(kept):
            raise BenchError(f"no {pattern!r} is left to leave out among {', '.join(group.name for group in kept)}.")
        kept = left
    return kept


def parts_of(pieces: Iterable[Piece], limit_bytes: int = PART_BYTES) -> list[list[Piece]]:
    """Divide pieces into parts of at most so many bytes: each goes into the first part that has room.

    Raises:
        BenchError: A piece is larger than a part.
    """
    limit_bytes -= len(END)
    parts: list[list[Piece]] = []
    for piece in pieces:
        if len(piece.content) > limit_bytes:
            raise BenchError(f"{piece.name} has {len(piece.content):,} bytes; a part has at most {limit_bytes:,}.")
        fitting = (part for part in parts if sum(len(other.content) for other in (*part, piece)) <= limit_bytes)
        part = next(fitting, None)
        if part is None:
            parts.append([piece])
        else:
            part.append(piece)
    return parts


def slices(name: str, size_bytes: int, limit_bytes: int = PART_BYTES) -> list[tuple[str, int, int]]:
    """Divide a file that is larger than a part: the name, begin and end of each slice."""
    count = -(-size_bytes // limit_bytes)
    if count <= 1:
        return [(name, 0, size_bytes)]
    return [
        (f"{name}.slice-{at}-of-{count}", at * limit_bytes, min(size_bytes, (at + 1) * limit_bytes))
        for at in range(count)
    ]


def packed(files: Iterable[tuple[str, bytes, int]], samples: bool = False) -> bytes:
    """Compress files to an xz stream of a tar archive without its end; a part is such streams and `END`.

    Args:
        files: Name, content and mode of each.
        samples: Whether they are samples of 16 bits.
    """
    raw = io.BytesIO()
    for name, content, mode in files:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content), mode
        raw.write(entry.tobuf())
        raw.write(content + bytes(-len(content) % tarfile.BLOCKSIZE))
    return lzma.compress(raw.getvalue(), filters=SAMPLES if samples else PLAIN)


END = lzma.compress(TAR_END)


def pieces_of(group: Group, root: Path, libraries: dict[str, Path]) -> Iterator[Piece]:
    """Compress the files of a group, a large file in pieces of its own.

    Raises:
        BenchError: A pattern of the group has no file.
    """
    small = [(f"{LIBRARIES}{name}", path.read_bytes(), 0o644) for name, path in sorted(libraries.items())]
    for name, path in found_files(group, root):
        content, mode = path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644
        cut = slices(name, len(content))
        if len(cut) == 1:
            small.append((name, content, mode))
            continue
        for slice_name, begin, end in cut:
            own = [(slice_name, content[begin:end], mode)]
            yield Piece(name=group.name, content=packed(own, group.samples))
    if small:
        yield Piece(name=group.name, content=packed(small, group.samples))


def found_files(group: Group, root: Path) -> list[tuple[str, Path]]:
    """List the name and path of each file of a group.

    Raises:
        BenchError: A pattern of the group has no file.
    """
    files: dict[str, Path] = {}
    for pattern in group.files:
        found = [path for path in sorted(root.glob(pattern)) if path.is_file()]
        if not found:
            raise BenchError(f"the packages of {group.name} have no {pattern}; change the patterns of its group.")
        files.update((str(path.relative_to(root)), path) for path in found)
    return list(files.items())


def shared_libraries(root: Path, programs: Iterable[str]) -> dict[str, Path]:
    """Find the libraries that programs need, except glibc's, with the dynamic linker of the root.

    Raises:
        BenchError: The root lacks a library.
    """
    folders = [root / folder for folder in (ARCHITECTURE_LIBRARIES, "lib/x86_64-linux-gnu")]
    # libpulse has a library of its own in a folder below.
    folders += sorted((root / ARCHITECTURE_LIBRARIES).glob("*/"))
    linker = next(folder / LINKER for folder in folders if (folder / LINKER).exists())
    path = ":".join(map(str, folders))
    found: dict[str, Path] = {}
    for program in programs:
        command = [str(linker), "--inhibit-cache", "--library-path", path, "--list", str(root / program)]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for name, place in LISTED_LIBRARY.findall(listed):
            if GLIBC.fullmatch(name):
                continue
            if not Path(place).is_relative_to(root):
                raise BenchError(f"no package brings {name}, which {program} needs; add one to its group.")
            found[name] = Path(place).resolve()
    return found


class Apt:
    """apt-get with a configuration of its own in a folder, which sees contrib and non-free too.

    Raises:
        BenchError: The system has no Debian archive to take them from.
    """

    def __init__(self, folder: Path) -> None:
        for name in ("lists/partial", "cache/archives/partial", "empty.d"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
        command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
        targets = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        archives = [line.split()[0] for line in targets.splitlines() if line.split()[1:] == [codename, "main"]]
        if not archives or not KEYRING.exists():
            raise BenchError("apt has no Debian archive with its keys; run this on Debian.")
        sources, status = folder / "sources.list", folder / "status"
        sources.write_text(f"deb [signed-by={KEYRING}] {archives[0]} {codename} {AREAS}\n")
        # Nothing is installed, so that all dependencies are downloaded.
        status.write_text("")
        self.archives = folder / "cache" / "archives"
        settings = {
            "Dir::Etc::SourceList": sources,
            "Dir::Etc::SourceParts": folder / "empty.d",
            "Dir::State::Lists": folder / "lists",
            "Dir::State::Status": status,
            "Dir::Cache": folder / "cache",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Debug::NoLocking": "true",
        }
        self.command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
        self.run("update")

    def run(self, *arguments: str, folder: Path | None = None) -> None:
        """Run apt-get, in a folder."""
        subprocess.run([*self.command, *arguments], cwd=folder, check=True, stdout=sys.stderr)

    def with_dependencies(self, names: Iterable[str]) -> list[Path]:
        """Download packages and all that they depend on; return the files."""
        self.run("install", "--yes", "--download-only", "--no-install-recommends", *names)
        return sorted(self.archives.glob("*.deb"))

    def packages(self, names: Iterable[str], folder: Path) -> None:
        """Download packages alone into a folder."""
        self.run("download", *names, folder=folder)


def make_root(work: Path, among: Sequence[Group]) -> Path:
    """Unpack the packages of the groups, and all that they depend on, into a folder."""
    apt, root, texts = Apt(work / "apt"), work / "root", work / "texts"
    for folder in (root, texts):
        folder.mkdir()
    programs = [name for group in among if group.name != "lines" for name in group.packages]
    for package in apt.with_dependencies(programs):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)
    if any(group.name == "lines" for group in among):
        apt.packages((HELP, PROMPTS), texts)
        (root / LINES).parent.mkdir(parents=True)
        (root / LINES).write_text("".join(f"{line}\n" for line in package_lines(texts)))
    return root


def pieces(among: Sequence[Group], root: Path) -> Iterator[Piece]:
    """Compress the groups; libraries that several of them need come first."""
    needed = {group.name: shared_libraries(root, group.programs) for group in among}
    counts = Counter(name for libraries in needed.values() for name in libraries)
    common = {name: path for libraries in needed.values() for name, path in libraries.items() if counts[name] > 1}
    yield from pieces_of(Group(name="libraries", packages=(), files=()), root, common)
    for group in among:
        yield from pieces_of(group, root, {n: p for n, p in needed[group.name].items() if n not in common})


def by_size(among: Sequence[Group], root: Path) -> list[Group]:
    """Move the voices of MBROLA with an accent to the end, the largest last."""
    accented = {f"mbrola-{name}" for name in many_voices.MBROLA_ACCENTED["train"]}
    last = [group for group in among if group.name in accented]
    sizes = {group.name: sum(path.stat().st_size for _, path in found_files(group, root)) for group in last}
    return [group for group in among if group not in last] + sorted(last, key=lambda group: sizes[group.name])


def write(folder: Path, parts: Sequence[Sequence[Piece]]) -> None:
    """Write the parts and install.sh, and say how large they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*.tar.xz"):
        old.unlink()
    for number, part in enumerate(parts, 1):
        content = b"".join(piece.content for piece in part) + END
        (folder / f"part-{number}.tar.xz").write_bytes(content)
        names = dict.fromkeys(piece.name for piece in part)
        print(f"part-{number}.tar.xz: {len(content) / (1 << 20):.1f} MiB: {', '.join(names)}", flush=True)
    program = Path(install_synthesizers.__file__).read_text()
    (folder / "install.sh").write_text(INSTALL.format(program=program))


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pack."""
    name = "python -m benchmarks.acceptance.speech.pack_synthesizers"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="such as rhvoice or 'mbrola-de*'")
    parsed = parser.parse_args(argv)
    try:
        among = chosen(groups(), parsed.without)
        with tempfile.TemporaryDirectory() as work:
            root = make_root(Path(work), among)
            write(parsed.folder, parts_of(pieces(by_size(among, root), root)))
    except (PenstockError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
