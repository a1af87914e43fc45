"""The end of the validity of a TLS certificate, and a sentence where that is past or near."""

import re
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.core.wording.counted import counted

# Renewals of certificates that are valid for weeks come earlier.
WARNED = timedelta(days=14)
# As OpenSSL reads them: from the begin of a line, or after the mark of UTF-8.
_PEM = re.compile(
    rb"(?:^|\A\xef\xbb\xbf)-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----"
    rb"(.*?)-----END (?:X509 |TRUSTED )?CERTIFICATE-----",
    re.DOTALL | re.MULTILINE,
)
# Tags of DER (X.690): SEQUENCE, the version as [0], UTCTime.
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17


def expiry_warning(certificate: Path, end: datetime, now: datetime) -> str | None:
    """Warn of a certificate that has expired, or will in fewer than 14 days; None for others.

    Args:
        certificate: Its file.
        end: The end of its validity.
        now: The time.
    """
    day = f"{end:%Y-%m-%d %H:%M:%S} UTC"
    renew = "renew it and restart the server"
    if end <= now:
        return f"the TLS certificate {certificate} expired at {day}, and clients refuse it: {renew}."
    if end - now >= WARNED:
        return None
    days = (end - now).days
    left = counted(days, "day") if days else "less than a day"
    return f"the TLS certificate {certificate} expires in {left}, at {day}: {renew}."


def valid_until(pem: bytes) -> datetime:
    """Return the end of the validity of the first certificate (RFC 5280, section 4.1).

    Raises:
        ValueError: There is none, or it is damaged.
    """
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("no certificate in PEM")
    text = found[1].decode("ascii", "replace")
    der = ssl.PEM_cert_to_DER_cert(f"-----BEGIN CERTIFICATE-----{text}-----END CERTIFICATE-----")
    fields = _content(der, 0)[1]
    at, parts = 0, list[tuple[int, bytes]]()
    tbs = _content(fields, 0)[1]
    while len(parts) < 5 and at < len(tbs):
        tag, content, at = _content(tbs, at)
        if tag != _VERSION:  # which certificates of version 1 do not have
            parts.append((tag, content))
    # Serial number, signature algorithm, issuer, validity.
    if len(parts) < 4 or parts[3][0] != _SEQUENCE:
        raise ValueError("no validity in the certificate")
    validity = parts[3][1]
    after = _content(validity, 0)[2]
    tag, text_bytes, _ = _content(validity, after)
    return _time(tag, text_bytes.decode("ascii", "replace"))


def _content(der: bytes, at: int) -> tuple[int, bytes, int]:
    """Return the tag and the content of the value at a place, and the place after it."""
    if at + 2 > len(der):
        raise ValueError("the certificate is cut short")
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length, begin = int.from_bytes(der[begin : begin + count], "big"), begin + count
    if begin + length > len(der):
        raise ValueError("the certificate is cut short")
    return tag, der[begin : begin + length], begin + length


def _time(tag: int, text: str) -> datetime:
    if tag == _UTC_TIME:
        # RFC 5280, section 4.1.2.5.1.
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
