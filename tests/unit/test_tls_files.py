"""A certificate or key that cannot be used: the sentence names the file and what is wrong with it."""

import subprocess
from pathlib import Path

import pytest

from penstock.core.errors import ServeError
from penstock.serve.http.tls_files import tls_of
from penstock.serve.settings import NetworkSettings
from tests.support.tls import Certificate, certificate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("made"))


def said(chain: Path, key: Path) -> str:
    with pytest.raises(ServeError) as refused:
        tls_of(NetworkSettings(tls_certificate=chain, tls_key=key))
    sentence = str(refused.value)
    assert sentence.startswith(f"the TLS certificate {chain} with the key {key} cannot be used (")
    return sentence.partition(" cannot be used (")[2].removesuffix(").")


def test_a_file_that_is_not_there_or_cannot_be_read(made: Certificate, tmp_path: Path) -> None:
    assert said(made.certificate, tmp_path / "none") == f"there is no file {tmp_path}/none"
    assert said(tmp_path, made.key) == f"{tmp_path} cannot be read: Is a directory"


def test_a_file_without_what_belongs_there(made: Certificate, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    assert said(empty, made.key) == f"{empty} holds no certificate in PEM"
    assert said(made.key, made.certificate) == f"{made.key} holds no certificate in PEM"
    assert said(made.certificate, empty) == f"{empty} holds no private key in PEM"


def test_another_key_and_a_locked_one(made: Certificate, tmp_path: Path) -> None:
    other = certificate(tmp_path).key
    assert said(made.certificate, other).startswith(f"{other} is not the key of the first certificate in")
    locked = tmp_path / "locked.pem"
    locking = ["openssl", "pkcs8", "-topk8", "-in", str(made.key), "-out", str(locked), "-passout", "pass:word"]
    subprocess.run(locking, check=True, capture_output=True, timeout=30)
    assert (
        said(made.certificate, locked)
        == f"{locked} is encrypted; decrypt it with 'openssl pkey -in {locked} -out FILE'"
    )


def test_what_openssl_refuses_for_another_reason(made: Certificate, tmp_path: Path) -> None:
    altered = tmp_path / "altered.pem"
    altered.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert said(altered, made.key)
