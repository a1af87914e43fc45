"""The end of a certificate: what OpenSSL says it is, and when a warning says so."""

import asyncio
import logging
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.serve.control import certificate_watch
from penstock.serve.control.certificate_watch import watch_certificate
from penstock.serve.http.tls_expiry import expiry_warning, valid_until
from tests.support.tls import certificate

END = datetime(2030, 5, 17, 12, 0, 0, tzinfo=UTC)
FILE = Path("certificate.pem")


def end_by_openssl(file: Path) -> datetime:
    command = ["openssl", "x509", "-enddate", "-noout", "-in", str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    return datetime.strptime(said.strip(), "notAfter=%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)


@pytest.mark.parametrize("days", [1, 30, 20_000], ids=["soon", "later", "after 2049"])
def test_the_end_is_the_one_that_openssl_reads(tmp_path: Path, days: int) -> None:
    made = certificate(tmp_path, days).certificate
    assert valid_until(made.read_bytes()) == end_by_openssl(made)


def test_of_a_chain_the_first_counts_whatever_stands_before_it(tmp_path: Path) -> None:
    for name, days in (("own", 40), ("issuer", 5)):
        (tmp_path / name).mkdir()
        certificate(tmp_path / name, days)
    own, issuer = (tmp_path / name / "certificate.pem" for name in ("own", "issuer"))
    before = b"subject=CN = localhost\r\n# an old -----BEGIN CERTIFICATE----- was here\r\n"
    chain = before + own.read_bytes().replace(b"\n", b"\r\n") + issuer.read_bytes()
    assert valid_until(chain) == end_by_openssl(own)
    # Some editors write the mark of UTF-8.
    assert valid_until(b"\xef\xbb\xbf" + chain[len(before) :]) == end_by_openssl(own)


def test_what_is_damaged_is_an_error_of_one_kind(tmp_path: Path) -> None:
    pem = certificate(tmp_path).certificate.read_bytes()
    lines = pem.splitlines(keepends=True)
    for damaged in (
        b"",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        lines[0] + lines[1] + lines[-1],
    ):
        with pytest.raises(ValueError, match="certificate"):
            valid_until(damaged)
    for at in range(len(lines[0]), len(pem) - len(lines[-1]), 7):
        try:
            valid_until(pem[:at] + b"/" + pem[at + 1 :])
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (timedelta(days=14), None),
        (
            timedelta(days=13, hours=23),
            "expires in 13 days, at 2030-05-17 12:00:00 UTC: renew it and restart the server.",
        ),
        (timedelta(days=1), "expires in 1 day, at 2030-05-17 12:00:00 UTC: renew it and restart the server."),
        (
            timedelta(hours=5),
            "expires in less than a day, at 2030-05-17 12:00:00 UTC: renew it and restart the server.",
        ),
        (
            timedelta(0),
            "expired at 2030-05-17 12:00:00 UTC, and clients refuse it: renew it and restart the server.",
        ),
    ],
)
def test_a_warning_has_the_date(left: timedelta, said: str | None) -> None:
    warning = expiry_warning(FILE, END, END - left)
    assert warning == (None if said is None else f"the TLS certificate certificate.pem {said}")


def test_a_server_that_runs_for_weeks_warns_once_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = certificate(tmp_path, 30).certificate
    start = end_by_openssl(made) - timedelta(days=16, hours=1)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        # What the server uses was read at its start.
        made.unlink(missing_ok=True)
        if len(slept) > 17:
            raise asyncio.CancelledError

    monkeypatch.setattr(certificate_watch.asyncio, "sleep", sleep)
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        asyncio.run(watch_certificate(made, lambda: start + timedelta(seconds=sum(slept))))
    said = [record.getMessage() for record in caplog.records]
    assert set(slept) == {certificate_watch.DAY_S}
    assert [text.partition(" expire")[2][:13] for text in said[:2]] == ["s in 13 days,", "s in 12 days,"]
    assert len(said) == 15
    assert " expired at " in said[-1]
    assert " less than a day, " in said[-2]


def test_a_file_whose_end_cannot_be_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(watch_certificate(tmp_path / "none"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"the end of the TLS certificate {tmp_path / 'none'} is not known" in caplog.text
