"""The short way of requests whose answers carry a load report: another lane, with one more header line in what it says.

Requests that ask for no report have no part of this.
"""

from dataclasses import replace
from typing import Any, final

from penstock.core.spec import Array
from penstock.serve.exchange.request import Request
from penstock.serve.exchange.response import Answer, Response, ShortAnswer, ShortWay
from penstock.serve.frontend.table_writer import Done
from penstock.serve.observe.load_report import HEADER, LoadMeter

_LINE_END = b"\r\n"


def with_report(response: Response, load: LoadMeter, form: str) -> Response:
    """Add a report to a response."""
    return replace(response, headers=(*response.headers, (HEADER, load.encode(form))))


@final
class ReportingAnswer:
    """Makes the answers of another short way, with a report.

    Args:
        short: The other one.
        load: Makes the reports.
        form: Their form.
    """

    __slots__ = ("_form", "_load", "_short")

    def __init__(self, short: ShortAnswer, load: LoadMeter, form: str) -> None:
        self._short, self._load, self._form = short, load, form

    @property
    def request(self) -> Request:
        """Stands for each request, see `ShortAnswer`."""
        return self._short.request

    def respond(self, output: Array) -> bytes | Response:
        """Make the response to a good result, see `ShortAnswer`."""
        response = self._short.respond(output)
        if isinstance(response, bytes):
            return reported(response, self._load.encode(self._form))
        return with_report(response, self._load, self._form)

    def answer(self, answer: Answer, status: int, output: Array) -> None:
        """Answer with a result the complete way, see `ShortAnswer`."""
        self._short.answer(lambda response: answer(with_report(response, self._load, self._form)), status, output)


@final
class ReportingLane:
    """Another lane, with reports.

    Args:
        lane: The other one.
        load: Makes the reports.
        form: Their form.
    """

    __slots__ = ("_form", "_lane", "_load")

    def __init__(self, lane: ShortWay, load: LoadMeter, form: str) -> None:
        self._lane, self._load, self._form = lane, load, form

    @property
    def answering(self) -> ReportingAnswer:
        """Makes the answer of the request that was submitted last."""
        return ReportingAnswer(self._lane.answering, self._load, self._form)

    def reject(self, now_ns: int) -> bytes | None:
        """Return the refusal of a request if it is certain, see `ShortWay`."""
        return self._reported(self._lane.reject(now_ns))

    def submit(self, data: bytes, done: Done, arrival_ns: int, now_ns: int) -> Any:
        """Submit a request, see `ShortWay`."""
        return self._reported(self._lane.submit(data, done, arrival_ns, now_ns))

    def _reported(self, taken: Any) -> Any:
        return reported(taken, self._load.encode(self._form)) if isinstance(taken, bytes) else taken


def reported(response: bytes, report: str) -> bytes:
    """Add a report to the bytes of a response, after its status line."""
    line = f"{HEADER}: {report}".encode()
    return response.replace(_LINE_END, b"\r\n%b\r\n" % line, 1)
