"""`penstock watch`, `index` and `search` as processes: what they print, how they end, and that they need no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.core.packs.pack import Pack
from penstock.core.packs.signature import new_key, public_file, sign
from tests.support.packs import colour_pack, flowers_pack, loud_pack, motion_pack
from tests.support.pictures import picture_folder
from tests.support.rtsp import camera, rtp_packets
from tests.support.thorough import thorough
from tests.support.videos import BLUE, RED, flat, video

# Whatever imports torch fails.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from penstock.cli import main
sys.argv = ["penstock", *sys.argv[1:]]
main()
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return colour_pack(tmp_path_factory.mktemp("packs") / "pack")


def penstock(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def refused(done: "subprocess.CompletedProcess[str]") -> str:
    """What a command that ends with status 2 says last, in one sentence."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_film_as_json_and_as_a_video(pack: Pack, tmp_path: Path) -> None:
    film = video(tmp_path / "film.mp4", [flat(RED)] * 5 + [flat(BLUE)] * 15)
    done = penstock("watch", pack.folder, "--source", film, "--every-frame", "--json", "-", "--out", tmp_path / "o.mp4")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["frame"] for line in lines] == list(range(20))
    assert (lines[0]["label"], lines[-1]["label"]) == ("red", "blue")
    assert "20 answered, 0 dropped, 0 broken" in done.stderr
    assert (tmp_path / "o.mp4").stat().st_size > 1000


@pytest.mark.thorough
def test_names_that_are_too_long(pack: Pack) -> None:
    long = 300 * "a"
    assert "is not a pack" in refused(penstock("watch", long))
    assert "(File name too long)" in refused(penstock("watch", pack.folder, "--source", long))


@pytest.mark.thorough
def test_what_is_watched_is_not_written_over(pack: Pack, tmp_path: Path) -> None:
    film = video(tmp_path / "film.mp4", [flat(RED)] * 3)
    before = film.read_bytes()
    (tmp_path / "other.mp4").symlink_to(film)
    for option in ("--out", "--json"):
        said = refused(penstock("watch", pack.folder, "--source", film, option, tmp_path / "other.mp4"))
        assert f"{option} is" in said
        assert "the source itself; name another file." in said
    assert film.read_bytes() == before


@pytest.mark.thorough
@pytest.mark.parametrize(("option", "name"), [("--json", "full.jsonl"), ("--out", "full.mp4")])
def test_a_full_disk_ends_in_a_sentence(pack: Pack, tmp_path: Path, option: str, name: str) -> None:
    film = video(tmp_path / "film.mp4", [flat(RED)] * 40)
    (tmp_path / name).symlink_to("/dev/full")
    done = penstock("watch", pack.folder, "--source", film, "--every-frame", option, tmp_path / name)
    assert refused(done) == f"penstock: {tmp_path / name} cannot be written (No space left on device)."


def test_pictures_of_which_some_are_broken(pack: Pack, tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "p", per_class=1, classes=("a", "b"))
    (root / "no.png").write_bytes(b"no")
    done = penstock("watch", pack.folder, "--source", root)
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["a/0.png", "b/0.png"]
    assert "2 answered, 0 dropped, 1 broken" in done.stderr
    assert "Left out: " in done.stderr


def test_sound_of_a_live_pack(tmp_path: Path) -> None:
    import wave

    import numpy as np

    folder = loud_pack(tmp_path / "loud").folder
    with wave.open(str(tmp_path / "a.wav"), "wb") as sink:
        sink.setnchannels(1)
        sink.setsampwidth(2)
        sink.setframerate(48_000)
        sink.writeframes(np.repeat([0, 8000, 0], 24_000).astype("<i2").tobytes())
    done = penstock("watch", folder, "--source", tmp_path / "a.wav", "--every-frame")
    assert (done.returncode, done.stdout.split()[2:]) == (0, ["loud"])


@pytest.mark.thorough
def test_a_pack_that_was_altered_or_that_another_signed(pack: Pack, tmp_path: Path) -> None:
    folder = colour_pack(tmp_path / "pack").folder
    mine, other = tmp_path / "mine.pem", tmp_path / "other.pem"
    new_key(mine)
    new_key(other)
    film = video(tmp_path / "film.mp4", [flat(RED)])
    watch = ("watch", folder, "--source", film, "--every-frame", "--key")
    assert "is not signed, but must be signed by" in refused(penstock(*watch, public_file(mine)))
    (folder / "pack.sig").write_bytes(sign((folder / "pack.json").read_bytes(), mine))
    assert penstock(*watch, public_file(mine)).returncode == 0
    assert "is signed by" in refused(penstock(*watch, public_file(other)))
    with (folder / "model.onnx").open("ab") as model:
        model.write(b"\0")
    assert "model.onnx is not the file that was written" in refused(penstock(*watch[:-1]))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--source", "4711"), "there is no camera /dev/video4711"),
        thorough(("--source", "nothing.mp4"), "there is no file nothing.mp4"),
        thorough(("--source", "rtsp://127.0.0.1:1/"), "rtsp://127.0.0.1:1/ cannot be opened (Connection refused)"),
        thorough(
            ("--source", "a.wav"), "not 16-bit sound of one channel; name a camera, a video or a folder of pictures."
        ),
        thorough(("--source", ""), "--source is empty"),
        thorough(("--view", "window"), "--view is 'window'; choose one of auto, terminal"),
        thorough(("--precision", "int8"), "has no int8 model; it has fp32"),
    ],
)
def test_what_cannot_be_watched(pack: Pack, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(penstock("watch", pack.folder, *arguments))


@pytest.mark.thorough
@pytest.mark.parametrize("then", ["end", "stall"])
def test_a_camera_in_the_network(pack: Pack, tmp_path: Path, then: str) -> None:
    packets = rtp_packets([flat(RED)] * 10 + [flat(BLUE)] * 10, 20)
    # Long enough for a camera whose thread a busy machine holds up.
    lines, stall = tmp_path / "seen.jsonl", "4" if then == "stall" else "20"
    with camera(packets, then=then) as address:
        done = penstock(
            "watch", pack.folder, "--source", address, "--json", lines, "--stall-timeout-s", stall, "--view", "none"
        )
    seen = [json.loads(line) for line in lines.read_text().splitlines()]
    # How many it looked at depends on how busy the machine is; the last one is never dropped.
    assert seen[-1]["frame"] == 19
    assert "answered" in done.stderr
    if then == "end":
        assert done.returncode == 0, done.stderr
    else:
        assert "it gave nothing" in refused(done) or "gave nothing for 4 s" in refused(done)


@pytest.mark.thorough
def test_a_film_that_stalls(pack: Pack, tmp_path: Path) -> None:
    whole = video(tmp_path / "film.ts", [flat(RED)] * 200, rate=100).read_bytes()
    pipe = tmp_path / "pipe.ts"
    os.mkfifo(pipe)
    command = ["watch", pack.folder, "--source", pipe, "--stall-timeout-s", "1.5", "--view", "none"]
    with (
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_TORCH, *map(str, command)], stderr=subprocess.PIPE, text=True
        ) as process,
        pipe.open("wb", buffering=0) as sink,
    ):
        sink.write(whole[: len(whole) * 3 // 4])
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "gave nothing for 1.5 s; it stalled or is gone" in said
    assert "answered" in said


@pytest.mark.thorough
def test_an_interrupted_watch_still_reports(pack: Pack, tmp_path: Path) -> None:
    film = video(tmp_path / "film.mp4", [flat(RED)] * 600, rate=20)
    lines = tmp_path / "seen.jsonl"
    command = ["watch", pack.folder, "--source", film, "--json", lines, "--out", tmp_path / "o.mkv", "--view", "none"]
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, command)], stderr=subprocess.PIPE, text=True
    ) as process:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and not (lines.exists() and lines.read_text().count("\n") > 3):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "age of an answer" in said
    assert (tmp_path / "o.mkv").stat().st_size > 1000


@pytest.mark.thorough
def test_an_index_and_a_search(pack: Pack, tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "p", per_class=2)
    (root / "no.png").write_bytes(b"no")
    index = tmp_path / "index"
    done = penstock("index", pack.folder, root, "--out", index)
    assert done.returncode == 0, done.stderr
    assert "Pictures: 6, 6 of them new, 1 left out" in done.stdout
    assert "Left out: " in done.stderr
    found = penstock("search", pack.folder, root / "dogs" / "0.jpg", "--index", index, "--format", "json")
    answers = json.loads(found.stdout)
    assert (len(answers), answers[0]["file"]) == (5, "dogs/0.jpg")
    assert penstock("search", pack.folder, root / "dogs" / "0.jpg", "--index", index).stdout.startswith("1.000  dogs/0")
    assert "is no index" in refused(penstock("search", pack.folder, root / "dogs" / "0.jpg"))
    assert "cannot be used: the file is not a picture" in refused(
        penstock("search", pack.folder, root / "no.png", "--index", index)
    )


@pytest.mark.thorough
def test_a_table_and_the_lines_of_a_sensor(tmp_path: Path) -> None:
    flowers, motion = flowers_pack(tmp_path / "flowers"), motion_pack(tmp_path / "motion", labels=True)
    table = tmp_path / "table.csv"
    table.write_text("5,3,1,0.5\n1,2\n6,3,4,1.5\n")
    done = penstock("watch", flowers.folder, "--source", table)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["line 1: setosa (5)", "line 3: setosa (6)"]
    assert "table.csv, line 2: it has 2 numbers where 4 belong" in " ".join(done.stderr.split())
    assert "rows" in done.stderr
    command = [sys.executable, "-c", WITHOUT_TORCH, "watch", str(motion.folder), "--source", "-", "--json", "-"]
    done = subprocess.run(command, input="1 2\n3 1\n", capture_output=True, text=True, timeout=60, check=False)
    assert [json.loads(line)["labels"] for line in done.stdout.splitlines()] == [["up"]]
    assert "of chunks, write --json" in refused(
        penstock("watch", motion.folder, "--source", table, "--out", tmp_path / "o.mp4")
    )
