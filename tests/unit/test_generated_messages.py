"""Messages of an answer that takes steps: outputs, replies to those so far, and a reply that fails."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from penstock.core.application import Application, reply_of
from penstock.core.errors import ApplicationError
from penstock.core.record import RecordSpec
from penstock.serve.registry.generated import GeneratedMessages
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.table import slots
from tests.support.generating import COUNTER, counter, tensor


@dataclass
class Served:
    """What the messages use of a served model."""

    application: Application
    name: str = "counter"
    counts: Counter[int] = field(default_factory=Counter[int])

    @property
    def reply(self) -> Callable[[Any], Any]:
        return reply_of(self.application)


def messages(application: Application) -> GeneratedMessages:
    return GeneratedMessages(cast(ServedModel, Served(application)))


def with_partial_replies(reply: Callable[[Any], Any] | None) -> Application:
    assert COUNTER.generate is not None
    return counter(reply=reply, generate=replace(COUNTER.generate, partial_replies=True))


def output(token: int) -> Any:
    record: Any = cast(RecordSpec, COUNTER.output).empty(1)
    record["token"] = token
    return record


def joined(answer: Any) -> dict[str, str]:
    if (answer["token"] == 9).any():
        raise ValueError("nine")
    return {"text": "-".join(map(str, answer["token"]))}


def test_a_step_has_the_reply_to_all_outputs_so_far() -> None:
    made = messages(with_partial_replies(joined))
    steps = [json.loads(made.step(output(token))) for token in (4, 2, 7)]
    assert [each["token"] for each in steps] == [4, 2, 7]
    assert [each["reply"]["text"] for each in steps] == ["4", "4-2", "4-2-7"]
    done = json.loads(made.done(slots.OK) or b"")
    assert (done["steps"], done["reply"]) == (3, {"text": "4-2-7", "ended": "end"})


def test_steps_have_outputs_alone_by_default() -> None:
    assert json.loads(messages(counter(reply=joined)).step(output(4))).keys() == {"token", "sums"}


def test_a_reply_that_raises_is_logged_once_and_null_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    made = messages(with_partial_replies(joined))
    with caplog.at_level(logging.ERROR):
        steps = [json.loads(made.step(output(token))) for token in (4, 9, 7)]
    assert [each["reply"] for each in steps] == [{"text": "4"}, None, None]
    assert len(caplog.records) == 1


def test_an_output_with_the_name_of_partial_replies_is_refused() -> None:
    assert COUNTER.generate is not None
    with pytest.raises(ApplicationError, match="has an output 'reply'"):
        counter(
            outputs={"reply": tensor("int64")},
            reply=None,
            generate=replace(COUNTER.generate, partial_replies=True),
        )
    with pytest.raises(ApplicationError, match="partial_replies=1; it must be True or False"):
        replace(COUNTER.generate, partial_replies=cast(bool, 1))
