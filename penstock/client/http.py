"""httpx2, and its responses as those of `retry`."""

import httpx2

from penstock.client.retry import Answer, NoAnswer


def answer_of(response: httpx2.Response, body: bytes) -> Answer:
    """Return a response with its body."""
    return Answer(response.status_code, {name.lower(): value for name, value in response.headers.items()}, body)


def no_answer(error: httpx2.RequestError) -> NoAnswer:
    """Describe a request without a whole response."""
    return NoAnswer(str(error) or type(error).__name__, isinstance(error, httpx2.TimeoutException))
