"""A pack as files: what is read is what was written, and whatever else there is is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from penstock.core.errors import PackCorrupt, PackError
from penstock.core.packs.pack import GOLDEN, MODEL, SIGNATURE, Pack, PackModel, digest, pack_json, read_pack
from penstock.core.packs.pack_live import PackLive, PackState
from penstock.core.packs.signature import new_key, public_file, read_public_key, sign
from penstock.core.prepare import RawSpec
from penstock.core.recognition import Recognition
from penstock.core.spec import TensorSpec
from penstock.core.storage.verified_folder import PACK_DESCRIPTION

LABELS = ("cat", "dog")
NO_TEXT = json.dumps({"sha256": "\ud800" * 64})
STATE = PackState(input="state_0", output="next_0", dtype="int64", shape=(1, 3), initial=2)


def write(folder: Path, **changes: Any) -> Pack:
    """A pack of four numbers to two probabilities, its graph no more than bytes."""
    inputs, outputs = np.ones((2, 4), np.float32), np.full((2, 2), 0.5, np.float32)
    contents = {MODEL: b"a graph", GOLDEN: save({"inputs": inputs, "outputs": outputs}), "web/index.html": b"<p>"}
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    fields: dict[str, Any] = {
        "folder": folder,
        "name": "pets",
        "description": "Tells cats from dogs – 猫.",
        "licence": "CC0-1.0",
        "made": {"penstock": "1", "bundle": "0" * 64},
        "kind": "oneshot",
        "inputs": (TensorSpec(name="numbers", dtype="float32", shape=(4,), meaning="four numbers"),),
        "outputs": (TensorSpec(dtype="float32", shape=(2,), meaning="probability", name="p", labels=LABELS),),
        "recognition": Recognition(labels=LABELS),
        "live": None,
        "tolerance": 1e-4,
        "golden_count": 2,
        "models": {"fp32": PackModel(file=MODEL, ms=0.5, agreement=1.0)},
        "files": {name: digest(data) for name, data in contents.items()},
    }
    pack = Pack(**fields | changes)
    (folder / PACK_DESCRIPTION).write_bytes(pack_json(pack))
    return pack


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another description, hashed as if it had been written so."""
    import hashlib

    fields = json.loads((folder / PACK_DESCRIPTION).read_bytes())
    change(fields)
    data = json.dumps(fields | {"sha256": "0" * 64})
    (folder / PACK_DESCRIPTION).write_text(data.replace("0" * 64, hashlib.sha256(data.encode()).hexdigest()))


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    live = PackLive(rate_hz=50.0, chunk=4, states=(STATE,), length="length", last="last", output_length="n")
    kinds: dict[str, dict[str, Any]] = {"oneshot": {}, "live": {"kind": "live", "live": live}}
    for kind, changes in kinds.items():
        folder = tmp_path / kind
        written = write(folder, **changes)
        assert (read_pack(folder).to_json(), read_pack(folder).live) == (written.to_json(), written.live)
    assert live.initial_states()["state_0"].tolist() == [[2, 2, 2]]


def test_golden_examples_come_one_by_one(tmp_path: Path) -> None:
    write(tmp_path)
    golden = read_pack(tmp_path).golden()
    assert [given.shape for given in golden.inputs] == [(4,), (4,)]
    assert (golden.outputs.shape, golden.tolerance) == ((2, 2), 1e-4)


def test_golden_pictures_of_several_sizes(tmp_path: Path) -> None:
    raws = {f"raw.{index}": np.zeros((index + 1, 5, 4), np.uint8) for index in range(3)}
    data = save(raws | {"outputs": np.zeros((3, 2), np.float32)})
    spec = RawSpec(dtype="uint8", shape=(None, None, 4), max_shape=(64, 64, 4), meaning="RGBA")
    pack = write(tmp_path, raw=spec, inputs=(), golden_count=3)
    (tmp_path / GOLDEN).write_bytes(data)
    pack = dataclasses.replace(pack, files=pack.files | {GOLDEN: digest(data)})
    (tmp_path / PACK_DESCRIPTION).write_bytes(pack_json(pack))
    assert [given.shape[0] for given in read_pack(tmp_path).golden().inputs] == [1, 2, 3]


@pytest.mark.parametrize("name", [MODEL, GOLDEN, "web/index.html", PACK_DESCRIPTION])
def test_one_flipped_bit_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    for at in range(0, len(data), max(1, len(data) // 40)):
        data[at] ^= 1
        (tmp_path / name).write_bytes(data)
        with pytest.raises(PackCorrupt, match=name.replace(".", r"\.")):
            read_pack(tmp_path)
        data[at] ^= 1
    (tmp_path / name).write_bytes(data)
    read_pack(tmp_path)


@pytest.mark.parametrize("name", [MODEL, GOLDEN, "web/index.html"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(PackCorrupt, match="is missing; copy the pack again"):
        read_pack(tmp_path)


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / MODEL).unlink()
    (tmp_path / MODEL).symlink_to("/dev/zero")
    with pytest.raises(PackCorrupt, match="it is no regular file"):
        read_pack(tmp_path)


def test_no_pack(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="penstock export BUNDLE"):
        read_pack(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fields: fields.update(schema_version=1), "schema version 1"),
        (lambda fields: fields.pop("outputs"), "outputs"),
        (lambda fields: fields.update(outputs=[]), "no input or no output"),
        (lambda fields: fields.update(inputs=[]), "no input or no output"),
        (lambda fields: fields.update(answers=2), "no input or no output"),
        (lambda fields: fields["inputs"][0].update(name="p"), "a name of its own"),
        (lambda fields: fields["inputs"][0].update(max_shape=[4]), "not named 'raw'"),
        (lambda fields: fields["inputs"][0].update(shape=[{"name": "n"}]), "not readable"),
        (lambda fields: fields.update(kind="live"), "kind"),
        (lambda fields: fields["models"].pop("fp32"), "no fp32 model"),
        (lambda fields: fields["models"]["fp32"].update(file="other.onnx"), "other.onnx"),
        (lambda fields: fields["files"].update({"../x": {"sha256": "0", "bytes": 1}}), "cannot be in a pack"),
        (lambda fields: fields["files"].update({"/etc/passwd": {"sha256": "0", "bytes": 1}}), "cannot be in a pack"),
        (lambda fields: fields.update(name=3), "another type"),
        (lambda fields: fields.update(files=[]), "not readable"),
        (lambda fields: fields["inputs"][0].update(dtype="text"), "dtype"),
        (lambda fields: fields["files"].update({"a\0b": {"sha256": "0", "bytes": 1}}), "cannot be in a pack"),
        (lambda fields: fields["golden"].update(tolerance=int("1" * 400)), "too large"),
        (lambda fields: fields["golden"].update(count=float("inf")), "infinity"),
        (lambda fields: fields["recognition"].update(labels=["a", "b", "c"], groups=["a", "b", "c"]), "other labels"),
    ],
)
def test_a_description_that_is_none(tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    write(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(PackCorrupt, match=said):
        read_pack(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"chunk": 0}, {"chunk": "4"}, {"rate_hz": 0}, {"rate_hz": None}, {"length": 1}, {"states": [{}]}, {"more": 1}],
)
def test_a_live_pack_that_cannot_be_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    live = PackLive(rate_hz=50.0, chunk=4, states=(STATE,), length="length", last="last", output_length="n")
    write(tmp_path, kind="live", live=live)
    rewritten(tmp_path, lambda fields: fields["live"].update(changes))
    with pytest.raises(PackCorrupt, match="not readable"):
        read_pack(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"sha256": 3}', "[" * 100_000, '{"sha256": "a"}', NO_TEXT])
def test_a_description_that_is_no_json(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / PACK_DESCRIPTION).write_text(text)
    with pytest.raises(PackCorrupt, match=r"pack\.json"):
        read_pack(tmp_path)


def test_a_signature_says_who_made_it(tmp_path: Path) -> None:
    folder, key = tmp_path / "pack", tmp_path / "key.pem"
    public = new_key(key)
    assert key.stat().st_mode & 0o777 == 0o600
    write(folder)
    with pytest.raises(PackError, match="is not signed"):
        read_pack(folder, public)
    (folder / SIGNATURE).write_bytes(sign((folder / PACK_DESCRIPTION).read_bytes(), key))
    assert read_pack(folder).signed_by == public
    assert read_pack(folder, read_public_key(str(public_file(key)))).signed_by == public
    other = new_key(tmp_path / "other.pem")
    with pytest.raises(PackError, match="not by"):
        read_pack(folder, other)


def test_a_signature_of_something_else_is_refused(tmp_path: Path) -> None:
    folder, key = tmp_path / "pack", tmp_path / "key.pem"
    new_key(key)
    write(folder)
    (folder / SIGNATURE).write_bytes(sign((folder / PACK_DESCRIPTION).read_bytes(), key))
    write(folder, description="Something else, sealed anew.")
    with pytest.raises(PackCorrupt, match="was altered"):
        read_pack(folder)
    for text in ("", "{}", '{"algorithm": "RSA"}', '{"algorithm": "Ed25519", "public_key": "x", "signature": 1}'):
        (folder / SIGNATURE).write_text(text)
        with pytest.raises(PackCorrupt, match=SIGNATURE):
            read_pack(folder)


def test_half_a_pair_of_keys_is_not_left(tmp_path: Path) -> None:
    (tmp_path / "k.pub.pem").write_text("somebody's")
    with pytest.raises(PackError, match=r"k\.pub\.pem is there already"):
        new_key(tmp_path / "k.pem")
    assert not (tmp_path / "k.pem").exists()


def test_keys_that_are_none(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    new_key(key)
    with pytest.raises(PackError, match="never overwritten"):
        new_key(key)
    with pytest.raises(PackError, match=r"private key.*key\.pub\.pem"):
        read_public_key(str(key))
    with pytest.raises(PackError, match="not an Ed25519 private key"):
        sign(b"", public_file(key))
    with pytest.raises(PackError, match="cannot be read"):
        sign(b"", tmp_path / "none.pem")
    with pytest.raises(PackError, match="cannot be read"):
        read_public_key("not base64 and no file")
    with pytest.raises(PackError, match="cannot be written"):
        new_key(tmp_path / "none" / "key.pem")
