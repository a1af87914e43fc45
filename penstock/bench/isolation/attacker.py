"""The attacker: one client that sends expensive inputs over several connections, at a bounded rate."""

import errno
import os
import socket
import time
from dataclasses import dataclass
from typing import final

from penstock.bench.isolation.expensive_inputs import ExpensiveInput

BYTES_A_SECOND = 1_000_000
# What may be sent at once after a pause.
BURST_BYTES = 20_000
CONNECTIONS, IDLE_CONNECTIONS = 16, 250
# Packets of opening and closing a connection.
OPENING_BYTES = 300
SEND_BYTES, READ_BYTES = 1 << 14, 1 << 16
TURN_S = 0.0005


@final
class RateLimit:
    """A token bucket: within any time t, at most `rate * t + burst` bytes.

    Args:
        rate: Bytes a second.
        burst: Most bytes that are saved up.
        now_s: The present time.
    """

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate, self._burst = rate, burst
        self._saved, self._at_s = burst, now_s

    def take(self, wanted: int, now_s: float) -> int:
        """Take up to as many bytes as are wanted; return how many may be sent."""
        self._saved = min(self._burst, self._saved + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        taken = min(wanted, int(self._saved))
        self._saved -= taken
        return taken

    def give_back(self, count: int) -> None:
        """Return bytes that were taken and not sent."""
        self._saved = min(self._burst, self._saved + count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One input and its time.

    Args:
        input: The input.
        begin_s: Its begin on the monotonic clock.
        end_s: Its end.
    """

    input: ExpensiveInput
    begin_s: float
    end_s: float


def attack(host: str, port: int, attack: Attack) -> int:
    """Send an input during its time; return the bytes sent."""
    return _Attacker(host, port, attack).run()


def place(cpus: frozenset[int] | None) -> None:
    """Give this process its cores, and there only the time that the other clients do not want."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@final
class _Attacker:
    def __init__(self, host: str, port: int, attack: Attack) -> None:
        self._address = host, port
        self._attack = attack
        self._open: list[_Connection] = []
        self._most = IDLE_CONNECTIONS if attack.input.idle else CONNECTIONS
        self.sent = 0

    def run(self) -> int:
        time.sleep(max(0.0, self._attack.begin_s - time.monotonic()))
        limit = RateLimit(BYTES_A_SECOND, BURST_BYTES, time.monotonic())
        while (now_s := time.monotonic()) < self._attack.end_s:
            moved = self._turn(limit, now_s)
            if not moved:
                time.sleep(TURN_S)
        for each in self._open:
            each.socket.close()
        return self.sent

    def _turn(self, limit: RateLimit, now_s: float) -> int:
        if len(self._open) < self._most and limit.take(OPENING_BYTES, now_s) == OPENING_BYTES:
            self._open.append(_Connection(self._address, self._attack.input))
            self.sent += OPENING_BYTES
        moved = 0
        for each in list(self._open):
            moved += each.move(limit, now_s)
            if each.is_over:
                each.socket.close()
                self._open.remove(each)
        # The next turn begins with another connection.
        self._open = self._open[1:] + self._open[:1]
        self.sent += moved
        return moved


@final
class _Connection:
    def __init__(self, address: tuple[str, int], sent: ExpensiveInput) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(address)
        self.is_over = False
        self._input = sent
        self._left = memoryview(sent.first or sent.again)
        self._answered = False

    def move(self, limit: RateLimit, now_s: float) -> int:
        """Read what came, and send what may be sent; return the bytes sent."""
        self._read()
        if self.is_over:
            return 0
        if not self._left:
            if self._input.again:
                self._left = memoryview(self._input.again)
            else:
                # All is sent: a new connection repeats it, once there is an answer.
                self.is_over = self._answered and not self._input.idle
                return 0
        allowed = limit.take(min(len(self._left), self._input.piece or SEND_BYTES), now_s)
        sent = 0
        try:
            sent = self.socket.send(self._left[:allowed]) if allowed else 0
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True
        limit.give_back(allowed - sent)
        self._left = self._left[sent:]
        return sent

    def _read(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            # Not connected yet.
            self.is_over = error.errno != errno.ENOTCONN
            return
        self._answered = True
        self.is_over = not data
