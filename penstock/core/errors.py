"""Every error that a user can cause or meet.

PenstockError                 says what, the value received, and the fix
├── ApplicationError          an application is declared wrong, or cannot be found
├── BundleError               a bundle cannot be used
│   ├── BundleCorrupt         a file is missing, cut short or altered
│   ├── SourcesChanged        the application is not the one the bundle was made with
│   └── GoldenMismatch        the network no longer gives its recorded answers
├── PackError                 a pack cannot be made or used
│   └── PackCorrupt           a file of it is missing, cut short or altered, or a signature is not of it
├── TrainError                a recipe, a run or a checkpoint is wrong
│   ├── OthersLost            the processes that train with this one ended, or do not come
│   └── BadExample            an example is damaged or missing
├── BenchError                a measurement cannot be trusted, so it is not given
├── SourceError               what a device should watch, hear or index cannot be read
├── ServeError                the server cannot start
│   ├── EngineLost            the engine ended before it was done; another one is started
│   └── DeviceLost            the GPU failed; only another process can use it again
├── ClientError               a client is set up wrong, or got no answer
│   ├── Unreachable           no connection, or it broke before the answer was whole
│   ├── TimedOut              no answer within the client's `timeout_s`
│   └── NotUnderstood         the answer is not one of a Penstock server
└── RequestError              a request gets no result; each knows its HTTP status
    ├── InvalidInput          400
    ├── Unauthorized          401
    ├── Forbidden             403
    ├── UnknownRoute          404
    ├── WrongMethod           405
    ├── TooSlow               408
    ├── TooLarge              413
    ├── UnsupportedContent    415
    ├── WrongVersion          426
    ├── ComputeFailed         500  the application's own code failed on this request
    ├── Overloaded            503  refused now; come back after `retry_after_s`
    │   └── TooLate           503  admitted, but it could not be answered in time after all
    └── DeadlineImpossible    504  the budget is shorter than the network's own time
"""


class PenstockError(Exception):
    """A mistake or a fault that is the reader's to mend: what is wrong, the value received, and the fix."""


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


class PackError(PenstockError):
    """A pack cannot be made of a bundle, or cannot be used."""


class PackCorrupt(PackError):
    """A file of a pack is missing, cut short, altered or of another schema, or its signature is of something else."""


class TrainError(PenstockError):
    """A recipe, a run folder or a checkpoint is wrong."""


class OthersLost(TrainError):
    """The processes that train together with this one ended, or did not come in time."""


class BadExample(TrainError):
    """An example cannot be read.

    Args:
        message: What is wrong with it, in a sentence.
        index: Which example of its set it is.
        name: What it is counted by: the file that is damaged.
    """

    def __init__(self, message: str, *, index: int, name: str) -> None:
        super().__init__(message)
        self.index = index
        self.name = name


class BenchError(PenstockError):
    """A measurement cannot be trusted, so no figure is given."""


class SourceError(PenstockError):
    """A camera, microphone, video, sound, picture or folder of them that a device should read cannot be read."""


class ServeError(PenstockError):
    """The server cannot start."""


class DeviceLost(ServeError):
    """The GPU failed in the middle of its work, for good as far as this process goes."""


class EngineLost(ServeError):
    """The engine's process ended before it had done what was asked; another one is started in its place."""


class ClientError(PenstockError):
    """A client is set up wrong, or got no answer."""


class Unreachable(ClientError):
    """No connection to the server, or it broke before the answer was whole."""


class TimedOut(ClientError):
    """No answer within the client's `timeout_s`."""


class NotUnderstood(ClientError):
    """What answered is not a Penstock server, or serves another bundle than a moment ago."""


class RequestError(PenstockError):
    """A request gets no result. `status` is the HTTP status that says so."""

    status = 500


class InvalidInput(RequestError):
    """The request's content is not what the application takes."""

    status = 400


class Unauthorized(RequestError):
    """The request needs an API key and has none that is known."""

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
    """The client began a request and fell silent."""

    status = 408


class TooLarge(RequestError):
    """The request's head, body or picture is larger than what is taken."""

    status = 413


class UnsupportedContent(RequestError):
    """A content type or encoding that the application does not read."""

    status = 415


class WrongVersion(RequestError):
    """An upgrade to another version of WebSocket. `spoken` goes into the Sec-WebSocket-Version header."""

    status = 426

    def __init__(self, message: str, spoken: str) -> None:
        super().__init__(message)
        self.spoken = spoken


class ComputeFailed(RequestError):
    """The application's own code raised, or its network gave NaN, on this request alone."""

    status = 500


class Overloaded(RequestError):
    """Refused: the answer would come too late. `retry_after_s` says when to come back, in seconds."""

    status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLate(Overloaded):
    """Admitted, but the answer could not come in time after all."""


class DeadlineImpossible(RequestError):
    """The request's budget is shorter than the network's own time, so that no load is low enough."""

    status = 504
