"""Every error that a user can cause or meet.

PenstockError                 states what is wrong, the value received, and the fix
├── ApplicationError          an application is declared wrong, or cannot be found
├── BundleError               a bundle cannot be used
│   ├── BundleCorrupt         a file is missing, cut short or altered
│   ├── SourcesChanged        the application is not the one the bundle was made with
│   └── GoldenMismatch        the network no longer gives its recorded answers
│       └── WholeNumberMismatch  whole numbers among them differ by one
├── PackError                 a pack cannot be made or used
│   └── PackCorrupt           a file of it is missing, cut short or altered, or a signature is not of it
├── TrainError                a recipe, a run or a checkpoint is wrong
│   ├── PeersLost             the other training processes ended, or did not start
│   └── BadExample            an example is damaged or missing
├── StorageError              a folder at a URL cannot be read or written
├── ClusterError              a cluster is not there, too small, or cannot run a job
├── ScoreError                a folder cannot be scored, or its scores not be written
├── BenchError                a measurement cannot be trusted, so it is not given
├── SourceError               a camera, microphone, video, sound or picture cannot be read
├── ServeError                the server cannot start
│   ├── EngineLost            the engine process ended; another one is started
│   ├── LoadGivenUp           a step of loading a model took too long
│   └── DeviceLost            the GPU failed; only a new process can use it again
├── ClientError               a client is configured wrong, or got no response
│   ├── Unreachable           no connection, or it broke before the response was complete
│   ├── TimedOut              no response within the client's `timeout_s`
│   └── InvalidResponse       the response is not one of a Penstock server
└── RequestError              a request gets no result; each has its HTTP status
    ├── InvalidInput          400
    ├── Unauthorized          401
    ├── Forbidden             403
    ├── UnknownRoute          404
    ├── WrongMethod           405
    ├── TooSlow               408
    ├── InvalidTicket         412
    ├── TooLarge              413
    ├── UnsupportedContent    415
    ├── WrongVersion          426
    ├── QuotaExceeded         429
    ├── ComputeFailed         500  the application's own code failed on this request
    ├── Unimplemented         501
    ├── Overloaded            503  load shedding; retry after `retry_after_s`
    │   └── TooLate           503  admitted, but the deadline passed
    ├── DeadlineImpossible    504  the budget is shorter than the network's own time
    └── UnsupportedVersion    505
"""


def encodable(text: str) -> str:
    r"""Replace what UTF-8 cannot encode, lone surrogates, by their escapes, such as `\ud800`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class PenstockError(Exception):
    """An error for the user: what is wrong, the value received, and the fix.

    Its text can be encoded in any protocol, also where it quotes one that cannot.
    """

    def __str__(self) -> str:
        return encodable(super().__str__())


class ApplicationError(PenstockError):
    """An application is declared wrong, or cannot be found."""


class BundleError(PenstockError):
    """A bundle cannot be used."""


class BundleCorrupt(BundleError):
    """A file of a bundle is missing, cut short, altered or of another schema."""


class SourcesChanged(BundleError):
    """The application's sources are not those that the bundle was made with."""


class GoldenMismatch(BundleError):
    """The network does not give the answers that were recorded with it."""


class WholeNumberMismatch(GoldenMismatch):
    """Whole numbers, which a network makes of fractions, differ by one."""


class PackError(PenstockError):
    """A pack cannot be made of a bundle, or cannot be used."""


class PackCorrupt(PackError):
    """A file of a pack is missing, cut short, altered or of another schema, or its signature does not match."""


class TrainError(PenstockError):
    """A recipe, a run folder or a checkpoint is wrong."""


class PeersLost(TrainError):
    """The other training processes ended, or did not start in time."""


class BadExample(TrainError):
    """An example cannot be read.

    Args:
        message: What is wrong with it, in a sentence.
        index: Index of the example in its set.
        name: Name in reports: the damaged file.
    """

    def __init__(self, message: str, *, index: int, name: str) -> None:
        super().__init__(message)
        self.index = index
        self.name = name


class ClusterError(PenstockError):
    """A cluster is not there, is too small, or cannot run a job; or the job failed, and would fail again."""


class StorageError(PenstockError):
    """A folder at a URL cannot be read or written."""


class ScoreError(PenstockError):
    """Inputs do not fit a bundle, or the output folder is of another run of `penstock score`."""


class BenchError(PenstockError):
    """A measurement cannot be trusted, so no figure is given."""


class SourceError(PenstockError):
    """A camera, microphone, video, sound, picture or folder of pictures cannot be read."""


class ServeError(PenstockError):
    """The server cannot start."""


class DeviceLost(ServeError):
    """The GPU failed; only a new process can use it again."""


class EngineLost(ServeError):
    """The engine process ended before it answered; another one is started in its place."""


class LoadGivenUp(ServeError):
    """A step of loading a model took too long."""


class ClientError(PenstockError):
    """A client is configured wrong, or got no response."""


class Unreachable(ClientError):
    """No connection to the server, or it broke before the response was complete."""


class TimedOut(ClientError):
    """No response within the client's `timeout_s`."""


class InvalidResponse(ClientError):
    """The response is not one of a Penstock server, or the server now serves another bundle."""


class RequestError(PenstockError):
    """A request gets no result; `status` is its HTTP status."""

    status = 500


class InvalidInput(RequestError):
    """The application does not accept the request's content."""

    status = 400


class Unauthorized(RequestError):
    """The request has no valid API key."""

    status = 401


class Forbidden(RequestError):
    """The request's key does not allow this."""

    status = 403


class UnknownRoute(RequestError):
    """No such path or model."""

    status = 404


class WrongMethod(RequestError):
    """The path exists, but not for this method. `allowed` goes into the Allow header."""

    status = 405

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class TooSlow(RequestError):
    """The client began a request and did not complete it in time."""

    status = 408


class InvalidTicket(RequestError):
    """The ticket of a live stream is not of this model, precision and API key, was altered, or has expired."""

    status = 412


class TooLarge(RequestError):
    """The request's head, body or picture is too large."""

    status = 413


class UnsupportedContent(RequestError):
    """The application does not read this content type or encoding."""

    status = 415


class WrongVersion(RequestError):
    """An upgrade to an unsupported version of WebSocket. `supported` goes into the Sec-WebSocket-Version header."""

    status = 426

    def __init__(self, message: str, supported: str) -> None:
        super().__init__(message)
        self.supported = supported


class QuotaExceeded(RequestError):
    """The client holds as many live streams as it may; one of them must end first."""

    status = 429


class ComputeFailed(RequestError):
    """The application's own code raised, or its network gave NaN, on this request alone."""

    status = 500


class Unimplemented(RequestError):
    """The server implements this method or this Transfer-Encoding of HTTP for no path."""

    status = 501


class Overloaded(RequestError):
    """Load shedding: the answer would be late. `retry_after_s` is the time until a retry, in seconds."""

    status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLate(Overloaded):
    """The request was admitted, but its deadline passed."""


class DeadlineImpossible(RequestError):
    """The request's budget is shorter than the network's own time, whatever the load."""

    status = 504


class UnsupportedVersion(RequestError):
    """The request is of a version of HTTP that the server does not speak."""

    status = 505


# Whose fault a load's failure is: the model's, and not the server's.
OF_BUNDLE = (ApplicationError, BundleError)


def one_line(error: BaseException, max_length: int = 300) -> str:
    """The message of another library's error, short enough for a sentence."""
    return " ".join(str(error).split())[:max_length].rstrip(".")
