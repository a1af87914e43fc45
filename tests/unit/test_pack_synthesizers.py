"""The pack of speech synthesizers: its parts, and their installation."""

import tarfile
from pathlib import Path
from typing import IO

import pytest

from benchmarks.acceptance.speech import install_synthesizers
from benchmarks.acceptance.speech.install_synthesizers import LIBRARIES, OWN_LIBRARIES, install, listed_libraries
from benchmarks.acceptance.speech.pack_synthesizers import (
    END,
    Group,
    Piece,
    chosen,
    found_files,
    groups,
    packed,
    parts_of,
    pieces_of,
    slices,
    write,
)
from penstock.apps.speech.many_voices import MBROLA, MBROLA_ACCENTED
from penstock.core.errors import BenchError


def piece(name: str, size_bytes: int) -> Piece:
    return Piece(name=name, content=bytes(size_bytes))


def names_of(parts: list[list[Piece]]) -> list[list[str]]:
    return [[piece.name for piece in part] for part in parts]


def test_a_piece_goes_into_the_first_part_with_room() -> None:
    pieces = [piece("a", 400), piece("b", 500), piece("c", 200), piece("d", 900), piece("e", 100)]
    assert names_of(parts_of(pieces, 1_000 + len(END))) == [["a", "b", "e"], ["c"], ["d"]]
    with pytest.raises(BenchError, match="d has 900 bytes; a part has at most 899"):
        parts_of(pieces, 899 + len(END))


def test_a_large_file_is_cut() -> None:
    assert slices("a/b", 10, 10) == [("a/b", 0, 10)]
    assert slices("a/b", 21, 10) == [
        ("a/b.slice-0-of-3", 0, 10),
        ("a/b.slice-1-of-3", 10, 20),
        ("a/b.slice-2-of-3", 20, 21),
    ]


def test_every_voice_of_mbrola_is_a_group_and_may_be_left_out() -> None:
    names = [group.name for group in groups()]
    voices = [f"mbrola-{name}" for table in (MBROLA, MBROLA_ACCENTED) for name in table["train"]]
    assert names[-len(voices) :] == voices
    assert [group.name for group in chosen(groups(), ["mbrola-*", "pico"])] == [
        name for name in names if name not in {*voices, "pico"}
    ]
    with pytest.raises(BenchError, match="no 'sapi' is left to leave out"):
        chosen(groups(), ["sapi"])


def test_a_pattern_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"the packages of a have no usr/bin/\*"):
        found_files(Group(name="a", packages=(), files=("usr/bin/*",)), tmp_path)


@pytest.mark.parametrize("samples", [False, True])
def test_installed_files_are_those_that_were_packed(tmp_path: Path, samples: bool) -> None:
    root, pack, other = tmp_path / "root", tmp_path / "pack", tmp_path / "other"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/talk").write_bytes(b"program")
    (root / "usr/bin/talk").chmod(0o755)
    (root / "known.so.1").write_bytes(b"packed")
    (root / "new.so.1").write_bytes(b"packed")
    group = Group(name="talk", packages=(), files=("usr/bin/*",), samples=samples)
    libraries = {name: root / name for name in ("known.so.1", "new.so.1")}
    write(pack, parts_of(pieces_of(group, root, libraries)))
    (other / "usr/bin").mkdir(parents=True)
    (other / "usr/bin/there").write_bytes(b"old")
    assert install(pack, other, frozenset({"known.so.1"})) == []
    assert (other / "usr/bin/talk").read_bytes() == b"program"
    assert (other / "usr/bin/talk").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (other / OWN_LIBRARIES).iterdir()] == ["new.so.1"]
    # A file that is there is left alone.
    (other / "usr/bin/talk").write_bytes(b"changed")
    install(pack, other, frozenset())
    assert (other / "usr/bin/talk").read_bytes() == b"changed"


def part(folder: Path, number: int, *files: tuple[str, bytes]) -> None:
    content = b"".join(packed([(name, content, 0o644)]) for name, content in files)
    (folder / f"part-{number}.tar.xz").write_bytes(content + END)


def test_slices_are_joined_once_all_are_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    part(tmp_path, 10, ("b.slice-1-of-2", b"b!"), ("a", b"a"), (f"{LIBRARIES}c", b"c"))
    assert install(tmp_path, root, frozenset()) == [str(root / "b")]
    assert not (root / "b").exists()
    (tmp_path / "part-10.tar.xz").unlink()
    part(tmp_path, 2, ("b.slice-0-of-2", b"bb"))
    assert install(tmp_path, root, frozenset()) == []
    assert (root / "b").read_bytes() == b"bbb!"
    assert [path.name for path in sorted(root.iterdir())] == ["a", "b", "opt"]


def test_what_a_full_disk_interrupts_is_written_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: IO[bytes], target: IO[bytes]) -> None:
        target.write(source.read(2))
        raise OSError("no space left")

    root = tmp_path / "root"
    part(tmp_path, 1, ("a", b"aaaa"))
    with monkeypatch.context() as patch:
        patch.setattr(install_synthesizers.shutil, "copyfileobj", full)
        with pytest.raises(OSError, match="no space left"):
            install(tmp_path, root, frozenset())
    assert install(tmp_path, root, frozenset()) == []
    assert [(path.name, path.read_bytes()) for path in root.iterdir()] == [("a", b"aaaa")]


def test_slices_that_were_half_joined_are_joined_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, read, left = tmp_path / "root", Path.read_bytes, [None]

    def fails(path: Path) -> bytes:
        if not left:
            raise OSError("no space left")
        left.pop()
        return read(path)

    part(tmp_path, 1, ("b.slice-0-of-2", b"bb"), ("b.slice-1-of-2", b"b!"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fails)
        with pytest.raises(OSError, match="no space left"):
            install(tmp_path, root, frozenset())
    assert install(tmp_path, root, frozenset()) == []
    assert [(path.name, path.read_bytes()) for path in root.iterdir()] == [("b", b"bbb!")]


def test_a_part_is_a_plain_archive(tmp_path: Path) -> None:
    part(tmp_path, 1, ("a", b"a" * 1_000), ("b", b""))
    with tarfile.open(tmp_path / "part-1.tar.xz") as archive:
        assert archive.getnames() == ["a", "b"]


def test_known_libraries_are_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("liba.so.1", "libb.so.1"):
        (tmp_path / "lib" / name).touch()
    listed = """4 libs found in cache `/etc/ld.so.cache'
\tliba.so.1 (libc6,x86-64) => /lib/liba.so.1
\tlibb.so.1 (libc6) => /lib/libb.so.1
\tlibgone.so.1 (libc6,x86-64) => /lib/libgone.so.1
Cache generated by: ldconfig
"""
    assert listed_libraries(listed, tmp_path) == {"liba.so.1"}
