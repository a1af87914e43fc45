"""A self-signed certificate, and a raw client that trusts it."""

import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.serving import RunningServer


@dataclass(frozen=True, slots=True)
class Certificate:
    """Signed by itself, for 127.0.0.1 and localhost."""

    certificate: Path
    key: Path

    def options(self) -> list[str]:
        """Options of `penstock serve`."""
        return ["--tls-certificate", str(self.certificate), "--tls-key", str(self.key)]

    def trusting(self) -> ssl.SSLContext:
        """Make a client's context that trusts only this certificate."""
        return ssl.create_default_context(cafile=str(self.certificate))

    def connected(self, server: RunningServer, timeout_s: float = 10.0) -> ssl.SSLSocket:
        """Open a client's connection and complete the handshake."""
        plain = socket.create_connection((server.host, server.port), timeout=timeout_s)
        return self.trusting().wrap_socket(plain, server_hostname=server.host)


def certificate(folder: Path, days: int = 30) -> Certificate:
    """Write a new certificate into a folder, which is valid for so many days."""
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(made.key), "-out", str(made.certificate), "-days", str(days), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return made
