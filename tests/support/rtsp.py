"""A camera in the network: RTSP over TCP, H.264 in RTP, and as much of both as a test needs."""

import socket
import socketserver
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av

from penstock.core.spec import Array

SDP = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n"


def rtp_packets(pictures: Sequence[Array], rate: int) -> list[bytes]:
    """The packets of some RGB pictures, as FFmpeg sends them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        receiver.settimeout(0.2)
        with av.open(f"rtp://127.0.0.1:{receiver.getsockname()[1]}", "w", format="rtp") as container:
            stream: Any = container.add_stream("libx264", rate=rate, options={"tune": "zerolatency", "crf": "10"})
            stream.height, stream.width, stream.pix_fmt = *pictures[0].shape[:2], "yuv420p"
            for number, picture in enumerate(pictures):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, rate)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        packets: list[bytes] = []
        while True:
            try:
                packets.append(receiver.recv(1 << 16))
            except TimeoutError:
                return packets


@contextmanager
def camera(packets: Sequence[bytes], *, then: str = "end") -> Generator[str]:
    """The address of a camera that sends these packets once, and then ends or stalls.

    Args:
        packets: Of `rtp_packets`.
        then: `"end"` or `"stall"`.
    """
    over = threading.Event()

    class Session(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self._head():
                method, number = head[0].split()[0], next(line for line in head if line.startswith("CSeq"))
                body, more = "", ""
                if method == "DESCRIBE":
                    body = SDP
                    more = f"Content-Type: application/sdp\r\nContent-Length: {len(body)}\r\n"
                elif method == "SETUP":
                    more = "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n"
                elif method == "OPTIONS":
                    more = "Public: DESCRIBE, SETUP, PLAY, TEARDOWN\r\n"
                self.wfile.write(f"RTSP/1.0 200 OK\r\n{number}\r\n{more}\r\n{body}".encode())
                if method == "PLAY":
                    for packet in packets:
                        # RTCP has types of 200 to 204 in its second byte.
                        channel = 1 if 200 <= packet[1] <= 204 else 0
                        self.wfile.write(struct.pack(">cBH", b"$", channel, len(packet)) + packet)
                    if then == "stall":
                        over.wait()
                    return

        def _head(self) -> list[str]:
            lines: list[str] = []
            while line := self.rfile.readline().decode().strip():
                lines.append(line)
            return lines

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads, block_on_close = True, True, False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that leaves is no fault."""

    with Server(("127.0.0.1", 0), Session) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"rtsp://127.0.0.1:{server.server_address[1]}/stream"
        finally:
            over.set()
            server.shutdown()
