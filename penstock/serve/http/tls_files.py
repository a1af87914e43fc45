"""The files of a certificate and its key, and their faults: OpenSSL's errors name neither the file nor a remedy."""

import ssl
from pathlib import Path

from penstock.core.errors import ServeError
from penstock.serve.settings import NetworkSettings

# More than any chain of certificates has.
MAX_BYTES = 1 << 20
_OTHER_KEY = "KEY_VALUES_MISMATCH"


def tls_of(network: NetworkSettings) -> ssl.SSLContext | None:
    """Make the TLS context; None without TLS.

    Raises:
        ServeError: The TLS files cannot be used.
    """
    if network.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would ask for that of an encrypted key on the terminal, and wait.
        context.load_cert_chain(network.tls_certificate, network.tls_key, password="")
    except OSError as error:
        assert network.tls_key is not None, network
        reason = fault_of(network.tls_certificate, network.tls_key, error)
        raise ServeError(
            f"the TLS certificate {network.tls_certificate} with the key {network.tls_key} cannot be used ({reason})."
        ) from None
    return context


def fault_of(certificate: Path, key: Path, error: OSError) -> str:
    """Describe why OpenSSL refused a certificate and its key.

    Args:
        certificate: The file of the certificate chain.
        key: The file of its private key.
        error: OpenSSL's error, or that of reading the files.
    """
    for file, label, what in (
        (certificate, b"CERTIFICATE-----", "certificate"),
        (key, b"PRIVATE KEY-----", "private key"),
    ):
        try:
            with file.open("rb") as source:
                content = source.read(MAX_BYTES)
        except FileNotFoundError:
            return f"there is no file {file}"
        except OSError as unread:
            return f"{file} cannot be read: {unread.strerror}"
        if label not in content:
            return f"{file} holds no {what} in PEM"
        if what == "private key" and b"ENCRYPTED" in content:
            return f"{file} is encrypted; decrypt it with 'openssl pkey -in {file} -out FILE'"
    reason = getattr(error, "reason", None) or str(error)
    if reason == _OTHER_KEY:
        return f"{key} is not the key of the first certificate in {certificate}; the server's own comes first there"
    return reason.replace("_", " ").lower()
