"""The header Accept (RFC 9110, section 12.5.1), for answers that have a form other than JSON."""

import re

from penstock.serve.exchange.request import Head

_REFUSED = re.compile(r"q=0(\.0*)?")


def accepts(head: Head, media_type: str) -> bool:
    """Return whether Accept names a media type (in lower case), in any case, and not with `q=0`; `*/*` names none."""
    for item in head.headers.get("accept", "").lower().split(","):
        name, *parameters = map(str.strip, item.split(";"))
        if name == media_type and not any(map(_REFUSED.fullmatch, parameters)):
            return True
    return False
