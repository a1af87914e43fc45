"""Sealed tickets: only what was sealed with a known key, for the same stream, and lately, is opened."""

from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidTicket, ServeError
from penstock.serve.streams.session_tickets import NONE_TAKEN, OTHER_START
from penstock.serve.streams.ticket_content import TicketContent, TicketFields
from penstock.serve.streams.tickets import FOREIGN, HEAD_BYTES, LIFE_S, TicketKeys
from penstock.serve.websocket.frames import MAX_REASON_BYTES
from tests.support.tickets import KEY, NOW_S, OTHER_KEY, SCOPE, sealer_with, tickets_each

CONTENT = b"a state" * 40
TICKET = sealer_with().seal(CONTENT, SCOPE)


@given(st.integers(0, len(TICKET) - 1), st.integers(1, 255))
def test_a_ticket_with_another_byte_is_refused(at: int, difference: int) -> None:
    changed = bytearray(TICKET)
    changed[at] ^= difference
    with pytest.raises(InvalidTicket, match=FOREIGN):
        sealer_with().open(bytes(changed), SCOPE)


@given(st.integers(0, len(TICKET) - 1), st.binary(max_size=40))
def test_a_ticket_that_is_cut_or_longer_is_refused(size: int, more: bytes) -> None:
    for changed in (TICKET[:size], TICKET[:size] + more, TICKET + more, more):
        if changed != TICKET:
            with pytest.raises(InvalidTicket, match=FOREIGN):
                sealer_with().open(changed, SCOPE)


@given(st.sampled_from(["application", "version_hash", "precision", "client"]), st.text())
def test_a_ticket_of_another_stream_is_refused(field: str, value: str) -> None:
    other = replace(SCOPE, **{field: getattr(SCOPE, field) + value})
    if value:
        with pytest.raises(InvalidTicket, match=FOREIGN):
            sealer_with().open(TICKET, other)
    assert sealer_with().open(TICKET, SCOPE) == CONTENT


@given(st.text() | st.binary().map(lambda data: b64encode(data).decode()))
def test_any_text_is_refused_as_a_ticket(text: str) -> None:
    tickets = tickets_each(1.0).of_stream("me")
    with pytest.raises(InvalidTicket, match=FOREIGN):
        tickets.open(text, encoding="raw", rate_hz=1000, binary=False)


def test_every_reason_fits_into_the_close_of_a_stream() -> None:
    assert all(len(reason) <= MAX_REASON_BYTES for reason in (FOREIGN, NONE_TAKEN, OTHER_START))


def test_no_part_of_the_scope_passes_for_another() -> None:
    moved = replace(SCOPE, application=SCOPE.application + SCOPE.version_hash, version_hash="")
    with pytest.raises(InvalidTicket):
        sealer_with().open(TICKET, moved)


def test_a_key_is_rotated() -> None:
    both = sealer_with(OTHER_KEY, KEY)
    assert both.open(TICKET, SCOPE) == CONTENT
    assert sealer_with(OTHER_KEY).open(both.seal(CONTENT, SCOPE), SCOPE) == CONTENT
    with pytest.raises(InvalidTicket, match=FOREIGN):
        sealer_with(OTHER_KEY).open(TICKET, SCOPE)


def test_an_expired_ticket_is_refused() -> None:
    # A clock that was set back since.
    assert sealer_with(now_s=lambda: NOW_S - 3600).open(TICKET, SCOPE) == CONTENT
    assert sealer_with(now_s=lambda: NOW_S + LIFE_S).open(TICKET, SCOPE) == CONTENT
    with pytest.raises(InvalidTicket, match="The ticket has expired"):
        sealer_with(now_s=lambda: NOW_S + LIFE_S + 1).open(TICKET, SCOPE)


def test_no_two_tickets_have_the_same_key_and_nonce() -> None:
    sealers = [sealer_with() for _ in range(3)]
    heads = {sealer.seal(CONTENT, SCOPE)[: HEAD_BYTES - 8] for sealer in sealers for _ in range(3)}
    assert len(heads) == 9


values = st.recursive(st.none() | st.integers(-9, 9) | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.integers(0, 1 << 40), values, st.binary(), st.binary(), st.binary())
def test_a_content_is_read_as_it_was_written(
    messages: int, memory: object, held: bytes, heard: bytes, state: bytes
) -> None:
    fields = TicketFields(
        messages=messages,
        without_samples=3,
        encoding="mulaw",
        rate_hz=44_100.5,
        binary=True,
        memory=memory,
        to_drop=17,
    )
    content = TicketContent(fields=fields, held=held, heard=heard, state=state)
    assert TicketContent.decode(content.encode()) == content


def test_keys_are_read_from_one_file_or_two(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(f"# new\n{KEY.hex()}\n\n")
    two.write_text(OTHER_KEY.hex().upper())
    assert TicketKeys.read((one,)).keys == (KEY,)
    assert TicketKeys.read((one, two)).keys == (KEY, OTHER_KEY)
    two.write_text(f"{KEY.hex()}\n{OTHER_KEY.hex()}\n")
    assert TicketKeys.read((two,)).keys == (KEY, OTHER_KEY)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 keys"),
        (f"{KEY.hex()}\n{KEY.hex()}", "2 keys"),
        (f"{KEY.hex()}\n{OTHER_KEY.hex()}\n{bytes(32).hex()}", "3 keys"),
        ("secret", "line 1 of .* is no key of 64 hexadecimal digits"),
        (KEY.hex()[:-1], "line 1"),
    ],
)
def test_files_without_keys_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ServeError, match=problem):
        TicketKeys.read((file,))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="cannot be read"):
        TicketKeys.read((tmp_path / "none",))
