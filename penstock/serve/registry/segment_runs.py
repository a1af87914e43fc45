"""Segments of one live stream on their way through the later steps of a chain, and their messages to the client."""

import logging
from collections.abc import Callable
from typing import Any, final

import orjson

from penstock.core.application import reply_of, unpacked
from penstock.core.chains.chain_run import as_chunk
from penstock.core.errors import ComputeFailed, InvalidInput, Overloaded, RequestError
from penstock.core.spec import Array
from penstock.serve.exchange.response import retry_after
from penstock.serve.registry.chain_request import StepReport
from penstock.serve.registry.generated import ENDED, REPLY_FAILED, GeneratedMessages
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import ended_by
from penstock.serve.streams.actions import BeginSegment

log = logging.getLogger(__name__)

# Sends a message, JSON, to the client.
SendText = Callable[[bytes], None]


@final
class SegmentRuns:
    """The segments of one stream that are under way; each is a request of the chain.

    Args:
        chain: A chain with segments.
        send: Sends a message to the client.
        ended: Called after the last message of each segment, unless it is cancelled.
    """

    def __init__(self, chain: ServedChain, send: SendText, ended: Callable[[], None]) -> None:
        assert chain.segments is not None, chain.name
        self._chain, self._send, self._ended = chain, send, ended
        self._max_under_way = chain.segments.max_under_way
        self._open: set[_SegmentRun] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, segment: BeginSegment, now_ns: int) -> None:
        """Send a segment through the steps; its budget begins now."""
        run = _SegmentRun(self._chain, segment, self._send, self._over)
        under_way = len(self._open)
        self._open.add(run)
        if under_way >= self._max_under_way:
            run.reject(
                Overloaded(
                    f"Chain {self._chain.name!r} takes at most {under_way} segments of a stream at once, and so many "
                    f"are under way; send the signal again later, or raise max_under_way of its Segments.",
                    1.0,
                )
            )
        else:
            run.begin(now_ns)

    def cancel(self) -> None:
        """Cancel all segments; they send nothing more."""
        runs, self._open = self._open, set()
        for run in runs:
            run.cancel()

    def _over(self, run: "_SegmentRun") -> None:
        if run in self._open:
            self._open.discard(run)
            self._ended()


@final
class _SegmentRun:
    """One segment."""

    def __init__(
        self, chain: ServedChain, segment: BeginSegment, send: SendText, over: Callable[["_SegmentRun"], None]
    ) -> None:
        self._chain, self._segment, self._send_text, self._report_over = chain, segment, send, over
        self._plan = chain.steps.plan
        self._cancel: Callable[[], None] | None = None
        self._over = False
        # Steps that are done, and of an answer in steps the messages, their number and why it ended.
        self._done = 0
        self._messages: GeneratedMessages | None = None
        self._steps, self._why = 0, ""

    def begin(self, now_ns: int) -> None:
        """Begin with the first step after the live one."""
        chain, value = self._chain, self._segment.value
        try:
            try:
                chunk = as_chunk(self._plan.application.input, value)
            except InvalidInput as error:
                # The chain's own function made it, no client.
                raise ComputeFailed(f"The segments of chain {chain.name!r} give no input: {error}") from None
            cancel = chain.submit_rows(
                chunk[None],
                self._finish,
                now_ns,
                None,
                observe=self._observe,
                stream=self._output,
                every_part=True,
            )
        except RequestError as error:
            self.reject(error)
            return
        if self._over:
            cancel()
        self._cancel = cancel

    def reject(self, error: RequestError) -> None:
        """End the segment with an error that the chain has not counted."""
        self._chain.count_rejection(error)
        self._fail(error)

    def cancel(self) -> None:
        """Cancel its work, and send nothing more."""
        self._over = True
        if self._cancel is not None:
            self._cancel()

    @property
    def _step_name(self) -> str:
        steps = self._plan.chain.steps
        return steps[min(self._done, len(steps) - 1)].name

    def _output(self, part: ServedModel, status: int, output: Array, last: bool) -> None:
        if self._over:
            return
        self._messages = self._messages or GeneratedMessages(part)
        self._steps += 1
        self._send("step", self._step_name, output=orjson.Fragment(self._messages.step(output)))
        if last:
            self._why = ended_by(status)

    def _observe(self, report: StepReport) -> None:
        """Send the answer of a part whose answer is not the chain's."""
        if self._over or report.error is not None:
            return
        step, is_last = self._plan.chain.steps[self._done], self._done == len(self._plan.chain.steps) - 1
        if step.part_name and not (is_last and self._plan.chain.join is None):
            part = self._plan.parts[step.part_name]
            try:
                replies = [
                    None if result is None else self._reply(reply_of(part), unpacked(part, result))
                    for result in report.results
                ]
            except ComputeFailed as error:
                if self._cancel is not None:
                    self._cancel()
                self.reject(error)
                return
            self._answer(step.name, replies if step.each is not None else replies[0], last=False)
            self._messages, self._steps, self._why = None, 0, ""
        self._done += 1

    def _finish(self, result: Any) -> None:
        if self._over:
            return
        if isinstance(result, RequestError):
            self._fail(result)
            return
        chain = self._chain
        try:
            reply = self._reply(chain.reply, chain.unpacked(result[0, ...]))
        except ComputeFailed as error:
            chain.count_broken_reply()
            self._fail(error)
            return
        self._answer(self._step_name if self._plan.chain.join is None else chain.name, reply, last=True)
        self._end()

    def _reply(self, reply: Callable[[Any], Any], answer: Any) -> orjson.Fragment:
        try:
            return orjson.Fragment(orjson.dumps(reply(answer)))
        except (Exception, SystemExit):
            log.exception("a reply of chain %r raised; that segment alone fails", self._chain.name)
            raise ComputeFailed(REPLY_FAILED) from None

    def _answer(self, part: str, reply: Any, *, last: bool) -> None:
        ended = {ENDED: self._why, "steps": self._steps} if self._steps else {}
        self._send("answer", part, reply=reply, last=last, **ended)

    def _fail(self, error: RequestError) -> None:
        retry = {"retry_after_s": retry_after(error)} if isinstance(error, Overloaded) else {}
        self._send("error", self._step_name, status=error.status, error=str(error), **retry)
        self._end()

    def _send(self, kind: str, part: str, **fields: Any) -> None:
        segment = self._segment
        self._send_text(
            orjson.dumps({"type": kind, "segment": segment.number, "seq": segment.seq, "part": part} | fields)
        )

    def _end(self) -> None:
        self._over = True
        self._report_over(self)
