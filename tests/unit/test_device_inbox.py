"""Which frames are looked at and how old they are then, without threads and with a clock of the test's own."""

import pytest

from penstock.device.inbox import Inbox, PlaybackClock
from penstock.device.source import SourceItem


def item_at(number: int, captured_s: float) -> SourceItem:
    return SourceItem(number=number, time_s=0.0, captured_s=captured_s)


def ages(*, frame_s: float, model_s: float, frames: int = 200) -> tuple[list[float], Inbox[SourceItem]]:
    """Of each answer, where frames come every `frame_s` and one is looked at for `model_s`."""
    inbox: Inbox[SourceItem] = Inbox()
    free_s, found = 0.0, list[float]()
    for number in range(frames):
        now_s = number * frame_s
        # What waited when the network became free before this frame came.
        while free_s <= now_s and (piece := inbox.take()):
            started_s = max(free_s, piece.captured_s)
            free_s = started_s + model_s
            found.append(free_s - piece.captured_s)
        inbox.offer(item_at(number, now_s))
        if free_s <= now_s:
            piece = inbox.take()
            assert piece is not None
            free_s = now_s + model_s
            found.append(model_s)
    return found, inbox


@pytest.mark.parametrize("model_s", [0.001, 0.02, 0.033, 0.05, 0.21])
def test_no_answer_is_older_than_the_network_and_one_frame(model_s: float) -> None:
    found, inbox = ages(frame_s=1 / 30, model_s=model_s)
    assert max(found) <= model_s + 1 / 30 + 1e-9
    waiting = len(inbox)
    assert len(found) + inbox.dropped + waiting == 200


def test_the_latest_frame_wins() -> None:
    inbox: Inbox[SourceItem] = Inbox()
    for number in range(4):
        inbox.offer(item_at(number, float(number)))
    assert inbox.take() == item_at(3, 3.0)
    assert inbox.take() is None
    assert inbox.dropped == 3


def test_sound_keeps_its_order_and_lets_the_oldest_go() -> None:
    inbox: Inbox[SourceItem] = Inbox(capacity=3)
    for number in range(5):
        inbox.offer(item_at(number, 0.0))
    taken = [inbox.take() for _ in range(4)]
    assert [piece.number for piece in taken if piece] == [2, 3, 4]
    assert inbox.dropped == 2


def test_a_recording_plays_at_its_pace() -> None:
    pace = PlaybackClock()
    # Decoded in no time: each is due at its own time after the first.
    assert [pace.due_s(time_s, 100.0) for time_s in (0.0, 0.04, 0.08)] == [100.0, 100.04, 100.08]
    assert pace.lag_s == 0


def test_a_slow_decoder_plays_later_instead_of_older_and_older() -> None:
    pace = PlaybackClock(max_lag_s=0.25)
    now_s, oldest_s = 100.0, 0.0
    for number in range(100):
        oldest_s = max(oldest_s, now_s - pace.due_s(number * 0.04, now_s))
        now_s += 0.1  # 10 frames a second where 25 are due
    assert oldest_s <= 0.25
    assert pace.lag_s == pytest.approx(99 * 0.06, abs=0.26)
