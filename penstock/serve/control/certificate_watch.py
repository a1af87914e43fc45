"""Warnings of a TLS certificate that has expired or soon will: at the start, and once a day."""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from penstock.serve.http.tls_expiry import expiry_warning, valid_until

log = logging.getLogger(__name__)

DAY_S = 86_400


async def watch_certificate(certificate: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
    """Warn now and once a day of the certificate that is in the file now, which is the one that the server uses.

    Args:
        certificate: The file of the certificate chain.
        now: The wall clock.
    """
    try:
        end = valid_until(certificate.read_bytes())
    except (OSError, ValueError) as error:
        # OpenSSL has taken it.
        log.warning(
            "the end of the TLS certificate %s is not known, so that nothing warns of it: %s", certificate, error
        )
        return
    while True:
        warning = expiry_warning(certificate, end, now())
        if warning is not None:
            log.warning("%s", warning)
        await asyncio.sleep(DAY_S)
