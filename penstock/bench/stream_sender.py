"""Plays a job's streams in the protocol that it names."""

from penstock.bench.stream_player import StreamJob, StreamsSent, play
from penstock.bench.stream_websocket import open_websockets

PROTOCOLS = ("websocket", "grpc")


def run_stream_job(job: StreamJob, protocol: str) -> StreamsSent:
    """Play a job's streams in this process."""
    if protocol == "websocket":
        return play(job, open_websockets)
    # Only here: WebSockets need no package of penstock[grpc].
    from penstock.bench.stream_grpc import open_sequences

    return play(job, open_sequences)
