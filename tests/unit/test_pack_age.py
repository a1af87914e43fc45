"""An older pack of the same signer under the same name is refused where its signer is required."""

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from penstock.cli.watch import pack_of
from penstock.core.errors import PackError
from penstock.core.packs.pack import Pack, pack_json
from penstock.core.packs.pack_age import refuse_older
from penstock.core.packs.signature import key_text
from penstock.core.storage.verified_folder import PACK_DESCRIPTION
from tests.support.device import sign
from tests.unit.test_pack import write

MINE, THEIRS = b"m" * 32, b"t" * 32


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return write(tmp_path / "pack")


def made(pack: Pack, when: str, name: str = "small", signer: bytes = MINE) -> Pack:
    return replace(pack, made={"when": when}, name=name, signed_by=signer)


def test_a_rollback_is_refused_and_the_way_back_said(pack: Pack, tmp_path: Path) -> None:
    records = tmp_path / "records"
    old, new = made(pack, "2026-01-01T00:00:00+00:00"), made(pack, "2026-02-01T00:00:00+00:00")
    for each in (old, new, new):
        refuse_older(each, records)
    # Half an hour before the new one, though its text sorts after it.
    for older in (old, made(pack, "2026-02-01T00:30:00+01:00")):
        with pytest.raises(PackError, match=r"a newer pack 'small' of the signer .* was used on this machine; get"):
            refuse_older(older, records)
    # Another name and another signer are other packs.
    refuse_older(made(pack, "2025-01-01T00:00:00+00:00", name="other"), records)
    refuse_older(made(pack, "2025-01-01T00:00:00+00:00", signer=THEIRS), records)
    with pytest.raises(PackError) as refused:
        refuse_older(old, records)
    (record,) = (file for file in records.iterdir() if str(file) in str(refused.value))
    record.unlink()
    refuse_older(old, records)


@pytest.mark.parametrize("when", ["", "yesterday", "2026-01-01T00:00:00"])
def test_a_signed_pack_without_a_time_is_refused(pack: Pack, tmp_path: Path, when: str) -> None:
    with pytest.raises(PackError, match="does not state when it was made"):
        refuse_older(made(pack, when), tmp_path / "records")


def test_records_that_cannot_be_written_are_said(pack: Pack, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "records").write_text("no folder")
    refuse_older(made(pack, "2026-01-01T00:00:00+00:00"), tmp_path / "records")
    assert "so an older pack would not be noticed later" in caplog.text


def test_a_required_signer_brings_the_check(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    mine = Ed25519PrivateKey.generate()
    public = mine.public_key().public_bytes_raw()
    old = {**pack.made, "when": "2026-01-01T00:00:00+00:00"}
    (pack.folder / PACK_DESCRIPTION).write_bytes(pack_json(replace(pack, made=old)))
    sign(pack.folder, mine)
    newer = made(pack, "2999-01-01T00:00:00+00:00", name=pack.name, signer=public)
    refuse_older(newer, tmp_path / "cache" / "signed-packs")
    with pytest.raises(PackError, match="was used on this machine"):
        pack_of(pack.folder, key_text(public))
    assert pack_of(pack.folder, None).signed_by == public
