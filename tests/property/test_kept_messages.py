"""What a client keeps of a stream: whatever is cut, each result comes once and in order; servers begin anew."""

from dataclasses import dataclass, field

import orjson
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.kept_messages import END, FLUSH, KeptMessages, Message

SEND, FLUSHES, CUT, ANSWER = range(4)
plays = st.lists(st.sampled_from([SEND, SEND, SEND, FLUSHES, CUT, ANSWER, ANSWER, ANSWER]), max_size=60)


@dataclass
class Server:
    """Answers each message with the sum of the bytes since the last flush, so that a result depends on what was before.

    Args:
        binary: Whether results are binary.
    """

    binary: bool
    sum: int = 0
    next: int = 0
    results: list[Message] = field(default_factory=list[Message])

    def take(self, message: Message) -> None:
        if message == END:
            self._answer(last=True)
            return
        if isinstance(message, bytes):
            assert int.from_bytes(message[:4], "little") == self.next
            self.sum += sum(message[4:])
        self._answer(last=False)
        self.next += 1
        if message == FLUSH:
            self.sum = 0

    def _answer(self, *, last: bool) -> None:
        if self.binary:
            self.results.append(self.next.to_bytes(4, "little") + self.sum.to_bytes(4, "little"))
        else:
            self.results.append(
                orjson.dumps({"type": "result", "seq": self.next, "event": self.sum, "last": last}).decode()
            )


def numbers(message: Message) -> tuple[int, int]:
    if isinstance(message, bytes):
        return int.from_bytes(message[:4], "little"), int.from_bytes(message[4:], "little")
    fields = orjson.loads(message)
    return fields["seq"], fields["event"]


@given(plays, st.booleans())
def test_each_result_comes_once_whatever_is_cut(play: list[int], binary: bool) -> None:
    undisturbed, server, kept = Server(binary), Server(binary), KeptMessages(1 << 20)
    heard: list[tuple[int, int]] = []
    sent = 0

    def send(message: Message) -> None:
        undisturbed.take(message)
        server.take(kept.add(message))

    def hear() -> None:
        if (message := kept.take(server.results.pop(0))) is not None:
            heard.append(numbers(message))

    def cut() -> None:
        nonlocal server
        server = Server(binary)
        beginning = kept.beginning()
        kept.begin(beginning)
        for message in beginning.messages:
            server.take(message)

    for move in play:
        if move in (SEND, FLUSHES):
            send(sent.to_bytes(4, "little") + bytes([sent % 251]) if move == SEND else FLUSH)
            sent += 1
        elif move == CUT:
            cut()
        elif server.results:
            hear()
    send(END)
    while server.results:
        hear()
    assert heard == [numbers(message) for message in undisturbed.results]
    assert not kept.waiting


def test_what_outgrows_its_memory_cannot_be_resumed() -> None:
    kept = KeptMessages(10)
    assert kept.add(bytes(8)) == bytes(8)
    assert kept.is_whole
    assert kept.add(b"\x01\0\0\0abcd") == b"\x01\0\0\0abcd"
    assert not kept.is_whole
    # It goes on all the same.
    assert kept.take(b"\0\0\0\0") == b"\0\0\0\0"
    assert kept.waiting


def test_an_answered_flush_frees_what_was_before_it() -> None:
    kept = KeptMessages(40)
    for number in range(20):
        kept.add(number.to_bytes(4, "little") + bytes(8) if number % 2 == 0 else FLUSH)
        kept.take(orjson.dumps({"type": "result", "seq": number}).decode())
    assert kept.is_whole
    beginning = kept.beginning()
    assert beginning.messages == []
    kept.begin(beginning)
    assert kept.add((20).to_bytes(4, "little") + b"x") == (0).to_bytes(4, "little") + b"x"
    assert kept.take('{"type":"result","seq":0}') == '{"type":"result","seq":20}'


def test_the_stream_of_a_chain_cannot_be_resumed() -> None:
    kept = KeptMessages(1 << 20)
    kept.add(bytes(8))
    step = '{"type":"step","segment":0,"seq":0,"part":"translate","output":{}}'
    assert kept.take(step) == step
    assert not kept.is_whole


def test_other_texts_pass() -> None:
    kept = KeptMessages(1 << 20)
    assert kept.take('{"type":"end"}') == '{"type":"end"}'
    assert kept.take("no JSON") == "no JSON"
