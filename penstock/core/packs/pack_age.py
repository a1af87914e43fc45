"""The newest pack of a signer that this machine has used: an older one under the same name is refused.

A signature proves who made a pack, not that it is the newest: whoever hosts packs could give out an old one again. The
time at which a pack was made is signed with it.
"""

import hashlib
import json
import logging
from datetime import datetime
from pathlib import Path

from penstock.core.errors import PackError
from penstock.core.packs.pack import Pack
from penstock.core.packs.signature import key_text
from penstock.core.storage.atomic_write import write_through

log = logging.getLogger(__name__)

WHEN = "when"


def refuse_older(pack: Pack, records: Path) -> None:
    """Refuse a signed pack that was made before one of the same signer and name that was used here, and record it.

    Args:
        pack: A pack whose signer was required.
        records: The folder of the records.

    Raises:
        PackError: It is older, or does not state when it was made.
    """
    assert pack.signed_by is not None, pack.folder
    identity = hashlib.sha256(pack.signed_by + pack.name.encode()).hexdigest()[:16]
    file = records / f"{identity}.json"
    when, newest = _time(pack.made.get(WHEN)), _recorded(file)
    if when is None:
        raise PackError(f"{pack.folder} is signed, but does not state when it was made; export and sign it again.")
    if newest is not None and when < newest:
        raise PackError(
            f"{pack.folder} was made at {when.isoformat()}, and a newer pack {pack.name!r} of the signer "
            f"{key_text(pack.signed_by)}, made at {newest.isoformat()}, was used on this machine; get the newest from "
            f"its maker, or remove {file} to go back to the older one."
        )
    if when == newest:
        return
    beside = file.with_name(f".{file.name}")
    try:
        records.mkdir(parents=True, exist_ok=True)
        write_through(beside, json.dumps({"name": pack.name, WHEN: when.isoformat()}).encode())
        beside.replace(file)
    except OSError as error:
        log.warning("%s cannot be written (%s), so an older pack would not be noticed later", file, error.strerror)


def _recorded(file: Path) -> datetime | None:
    try:
        return _time(json.loads(file.read_bytes())[WHEN])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _time(given: object) -> datetime | None:
    """Parse a time; None if it is none, or does not state its zone, without which times do not compare."""
    try:
        when = datetime.fromisoformat(given) if isinstance(given, str) else None
    except ValueError:
        return None
    return when if when is not None and when.tzinfo is not None else None
