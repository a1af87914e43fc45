"""The application: one frozen record that training, serving and devices all start from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from penstock.core.agreement import RowSets
from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.finish import Finish
from penstock.core.generate import Generate, whole_answer
from penstock.core.initial import Initial
from penstock.core.picture_file import PictureFile
from penstock.core.pictures.boxes import Boxes
from penstock.core.pictures.dense import Dense
from penstock.core.prepare import Prepare, is_factory
from penstock.core.recognition import Recognition
from penstock.core.record import ChunkSpec, RecordSpec, chunk_spec, dims_of
from penstock.core.spec import Array, TensorSpec
from penstock.core.streams.live import WAV, Live, is_sound
from penstock.core.texts.subword_text import DECLARED_TEXT, SubwordReply

Decode = Callable[[bytes, str], Any]
Reply = Callable[[Any], Any]

_NOT_GIVEN = RecordSpec(())
# Longest name: that of a folder on Linux.
MAX_NAME = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """A network with its inputs, outputs and training, declared once.

    `model` and `recipe` may be objects or import paths: `":Net"` (in the application's own module) or `"pkg.mod:Net"`.
    With paths, reading the application loads no torch.

    Args:
        name: Its name in URLs: letters, digits, `-` and `_`, 255 at most.
        input: One raw chunk, as `decode` returns it and the model takes it, before any numeric preparation. The short
            form of `inputs` for one tensor. Read from an application, it is the spec of one chunk: that tensor, or a
            `RecordSpec` where there are several or where lengths vary.
        output: One chunk of the model's output; the short form of `outputs`, as `input`.
        inputs: The tensors of one chunk by name. A `Dim` in a shape is a length that varies from request to request.
        outputs: The tensors of the model's output by name. A `Dim` that an input has too is of the same length.
        model: Makes the `torch.nn.Module`, without arguments. Its `forward` takes a batch of raw inputs, shaped
            `[B, *input.shape]`, and training calls it. Several inputs are passed as keyword arguments, or as one
            mapping if it has one parameter. It gives one tensor, or several as a tuple, a mapping or an object with
            attributes. `predict`, if it has one, is served and recorded instead of `forward`, for example to turn
            logits into probabilities.
        decode: Turns a request's body and content type into one raw array of `input` (several inputs, or lengths that
            vary: a dictionary of arrays by name), or of `prepare.raw` where that is declared. It only turns bytes into
            numbers. Raw bytes and JSON arrays of `input` need no `decode`.
        prepare: For raw arrays of varying size (photos): makes one chunk of `input` of what `decode` returned. It is
            exported with the bundle, and the same graph runs everywhere.
        finish: For outputs that are not numerically stable (the largest scores, boxes without those that overlap):
            makes `outputs` of the network's own outputs. Training calls the network alone; it runs everywhere else.
        recognition: Turns a classifier's probabilities into an answer, and smooths it over a video; its labels are
            those of `output`.
        dense: For a network that is applied to every place of a large picture: the geometry of its tiles and maps.
        shows: For outputs that are boxes in the picture: given in its pixels, and drawn over it by the server's page.
        reply: Turns one output (several: a dictionary of arrays) into the JSON values of the response. By default the
            output as nested lists.
        recipe: A `penstock.Recipe` to train it, or a function that makes one.
        initial: Weights that a training starts from: an `Initial`, or its source alone. Only a new training reads them.
        accepts: The content types that `decode` reads, such as `("image/png",)`.
        max_body_bytes: A larger request body is refused with 413.
        chunks: Chunks of one client that may wait in its slot; 1 for one-shot requests, at least 2 for live streams,
            where a chunk arrives while the one before is computed.
        live: For inputs that are chunks of a live signal; None for one-shot requests.
        generate: For answers that take steps, such as a text token by token; `output` is that of one step then, and
            `reply` takes the outputs of all steps, stacked. None for answers of one step.
        description: One sentence for people.

    Raises:
        ApplicationError: A name that is not valid in a URL, or a field out of range.
    """

    name: str
    input: ChunkSpec = _NOT_GIVEN
    output: ChunkSpec = _NOT_GIVEN
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec], compare=False)
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec], compare=False)
    model: Callable[[], Any] | str
    decode: Decode | None = None
    prepare: Prepare | None = None
    finish: Finish | None = None
    recognition: Recognition | None = None
    dense: Dense | None = None
    shows: Boxes | None = None
    reply: Reply | None = None
    recipe: Any = None
    initial: Initial | str | None = None
    accepts: tuple[str, ...] = ()
    max_body_bytes: int = 1 << 23
    chunks: int = 1
    live: Live | None = None
    generate: Generate | None = None
    description: str = ""
    # Both forms of each side, as completed, so that `replace` shows which of them it changed.
    _completed: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_url_safe(self.name):
            raise ApplicationError(f"Application has name {self.name!r}; use letters, digits, '-' and '_'.")
        for side in ("input", "output"):
            self._name_tensors(side)
        self._check_names()
        self._check_fields()
        if self.max_body_bytes < self.input.nbytes:
            raise ApplicationError(
                f"Application {self.name!r} has max_body_bytes={self.max_body_bytes:,}, less than one chunk "
                f"of {self.input.describe()} ({self.input.nbytes:,} bytes)."
            )
        if self.live is not None:
            self._check_live()
        if self.generate is not None:
            self._check_generate(self.generate)
        self._check_defaults()
        if self.decode is not None and not self.accepts:
            raise ApplicationError(
                f"Application {self.name!r} has a decode but accepts nothing; name its content types in `accepts`."
            )
        decoded = self.input if self.prepare is None else self.prepare.raw
        if isinstance(self.decode, (*DECLARED_TEXT, PictureFile)) and not self.decode.fits(decoded):
            raise ApplicationError(
                f"Application {self.name!r} has decode={self.decode!r} and inputs {decoded.describe()}; it needs "
                f"{self.decode.needs}."
            )
        if isinstance(self.reply, SubwordReply) and not self.reply.fits(self.answer):
            raise ApplicationError(
                f"Application {self.name!r} has reply={self.reply!r} and gives {self.answer.describe()}; it needs a "
                f"list of whole numbers, a token each, named {self.reply.tensor!r}."
            )
        if self.prepare is not None and (self.decode is None or self.live is not None):
            wrong = "no decode, which would give the raw arrays" if self.decode is None else "a live signal as well"
            raise ApplicationError(f"Application {self.name!r} has a prepare and {wrong}; leave one of them out.")
        if self.prepare is not None and isinstance(self.input, RecordSpec):
            raise ApplicationError(
                f"Application {self.name!r} has a prepare and inputs {self.input.describe()}; a prepare makes one "
                f"tensor of fixed size."
            )
        if self.dense is not None:
            self.dense.check(self.input, self.output)
        if self.finish is not None:
            self._check_finish(self.finish)
        if self.shows is not None:
            self._check_shown(self.shows)
        if self.recognition is not None and self.recognition.labels != self.output.labels:
            raise ApplicationError(
                f"Application {self.name!r} has a recognition whose labels are not those of its output; give both the "
                f"same."
            )

    @property
    def answer(self) -> ChunkSpec:
        """One whole answer: one output, or where it takes steps the outputs of all of them, stacked."""
        if self.generate is None:
            return self.output
        return whole_answer(self.outputs.values(), self.generate.max_steps)

    @property
    def input_tensor(self) -> TensorSpec:
        """The one input, of fixed size.

        Raises:
            ApplicationError: There are several, or lengths vary.
        """
        return self._only_tensor("input", self.input)

    @property
    def output_tensor(self) -> TensorSpec:
        """The one output, of fixed size.

        Raises:
            ApplicationError: There are several, or lengths vary.
        """
        return self._only_tensor("output", self.output)

    @property
    def row_sets(self) -> RowSets | None:
        """The rows of the outputs that are compared as sets; None without a `finish`."""
        return None if self.finish is None else self.finish.row_sets(self.inputs, self.outputs)

    def _only_tensor(self, side: str, spec: ChunkSpec) -> TensorSpec:
        if isinstance(spec, RecordSpec):
            raise ApplicationError(
                f"Application {self.name!r} has the {side}s {spec.describe()}; here it must be one tensor of fixed "
                f"size."
            )
        return spec

    def _name_tensors(self, side: str) -> None:
        """Complete `input` and `inputs` (or `output` and `outputs`) from the one that was given."""
        one, several = getattr(self, side), getattr(self, f"{side}s")
        if side in self._completed:
            known_one, known_several = self._completed[side]
            if one is known_one and several is known_several:
                return
            if one is known_one:
                one = _NOT_GIVEN
            elif several is known_several:
                several = {}
        if not isinstance(several, Mapping) or not all(isinstance(spec, TensorSpec) for spec in several.values()):
            raise ApplicationError(
                f"Application {self.name!r} has {side}s={_shown(several)}; it must be a dictionary of TensorSpecs by "
                f"name."
            )
        if one is _NOT_GIVEN:
            tensors = {name: replace(spec, name=name) for name, spec in several.items()}
        elif isinstance(one, TensorSpec) and not several:
            name = one.name or side
            tensors = {name: replace(one, name=name)}
        else:
            fix = f"give {side} or {side}s, not both" if several else "it must be a TensorSpec"
            raise ApplicationError(f"Application {self.name!r} has {side}={_shown(one)}; {fix}.")
        if not tensors:
            raise ApplicationError(f"Application {self.name!r} has no {side}; give {side}=TensorSpec(...).")
        object.__setattr__(self, f"{side}s", tensors)
        object.__setattr__(self, side, chunk_spec(tensors.values()))
        completed = {**self._completed, side: (getattr(self, side), tensors)}
        object.__setattr__(self, "_completed", completed)

    def _check_names(self) -> None:
        shared = sorted(self.inputs.keys() & self.outputs.keys())
        if shared:
            raise ApplicationError(
                f"Application {self.name!r} has an input and an output with the name {shared[0]!r}; exported graphs "
                f"need different names."
            )
        # The same name is the same length on both sides too.
        dims_of((*self.inputs.values(), *self.outputs.values()))
        several = isinstance(self.input, RecordSpec) or isinstance(self.output, RecordSpec)
        if several and self.live is not None:
            raise ApplicationError(
                f"Application {self.name!r} is live and has inputs {self.input.describe()} and outputs "
                f"{self.output.describe()}; a live signal has one input and one output of fixed size."
            )
        if self.recognition is not None and isinstance(self.output, RecordSpec):
            raise ApplicationError(
                f"Application {self.name!r} has a recognition and outputs {self.output.describe()}; a recognition "
                f"needs one output, of probabilities."
            )

    def _check_finish(self, finish: Finish) -> None:
        if self.live is not None or self.generate is not None:
            what = "is live" if self.live is not None else "generates"
            raise ApplicationError(
                f"Application {self.name!r} {what} and has a finish, which takes the answer of one step; leave it out."
            )
        self.row_sets  # noqa: B018
        # Each name is another tensor, and each dimension one length.
        dims_of((*self.inputs.values(), *finish.tensors, *self.outputs.values()))

    def _check_shown(self, shows: Boxes) -> None:
        if self.prepare is None or self.reply is not None or self.generate is not None:
            raise ApplicationError(
                f"Application {self.name!r} has shows, which needs a prepare that scales pictures into the frame, and "
                f"neither reply nor generate; leave shows out."
            )
        if isinstance(self.decode, PictureFile) and (self.decode.size or self.decode.at_least):
            raise ApplicationError(
                f"Application {self.name!r} has shows and decode={self.decode!r}; boxes are in the pixels of the "
                f"decoded picture, so decode it whole, without size and at_least."
            )
        shows.check(self.outputs)

    def _check_live(self) -> None:
        for name, spec in (("input", self.input), ("output", self.output)):
            if not spec.shape:
                raise ApplicationError(
                    f"Application {self.name!r} is live and has {name} {spec.describe()}; a chunk's frames come first."
                )
        if self.chunks < 2:
            raise ApplicationError(
                f"Application {self.name!r} is live and has chunks={self.chunks}; give it 2 at least, such as 8."
            )
        if self.live is not None and self.live.speech is not None and not is_sound(self.input):
            raise ApplicationError(
                f"Application {self.name!r} has speech and input {self.input.describe()}; speech is in sound, a "
                f"one-dimensional int16 input."
            )
        if self.live is not None and self.live.beam is not None:
            output = self.output_tensor
            labels = output.labels or ()
            if len(output.shape) != 2 or output.shape[-1:] != (len(labels),) or " " not in labels[1:]:
                raise ApplicationError(
                    f"Application {self.name!r} has a beam and output {output.describe()}; a beam needs the "
                    f"log-probabilities of symbols, frames first, whose labels are CTC's blank and characters with ' '."
                )
        if self.reply is not None:
            raise ApplicationError(
                f"Application {self.name!r} is live and has a reply; give `Live` its `events` instead."
            )

    def _check_generate(self, generate: Generate) -> None:
        generate.check(self.name, self.inputs, self.outputs)
        for name, given in (("live", self.live), ("recognition", self.recognition)):
            if given is not None:
                raise ApplicationError(f"Application {self.name!r} has generate and {name}; leave one of them out.")
        if self.chunks != 1:
            raise ApplicationError(
                f"Application {self.name!r} has generate and chunks={self.chunks}; a request has one chunk, so leave "
                f"chunks out."
            )

    def _check_defaults(self) -> None:
        for side, tensors in (("output", self.outputs), ("only input", self.inputs if len(self.inputs) == 1 else {})):
            for name, spec in tensors.items():
                if spec.default is not None:
                    raise ApplicationError(
                        f"Application {self.name!r} has a default for its {side} {name!r}; defaults are for inputs "
                        f"beside others."
                    )

    def _check_fields(self) -> None:
        types = isinstance(self.accepts, tuple) and all(map(_is_content_type, self.accepts))
        made = is_factory(self.model)
        for name, good, fix in (
            ("model", made, "a class or function that makes the network, or its import path, not the network itself"),
            ("decode", self.decode is None or callable(self.decode), "a function of a request's body and content type"),
            ("reply", self.reply is None or callable(self.reply), "a function of one output"),
            ("accepts", types, "a tuple of content types in lower case, such as ('image/png',)"),
            ("chunks", type(self.chunks) is int and self.chunks >= 1, "a whole number, at least 1"),
            ("live", self.live is None or isinstance(self.live, Live), "a Live, for streams"),
            ("generate", self.generate is None or isinstance(self.generate, Generate), "a Generate"),
            ("prepare", self.prepare is None or isinstance(self.prepare, Prepare), "a Prepare"),
            (
                "initial",
                self.initial is None or isinstance(self.initial, Initial | str),
                "an Initial, or its source",
            ),
            ("finish", self.finish is None or isinstance(self.finish, Finish), "a Finish"),
            ("recognition", self.recognition is None or isinstance(self.recognition, Recognition), "a Recognition"),
            ("shows", self.shows is None or isinstance(self.shows, Boxes), "a Boxes"),
            ("dense", self.dense is None or isinstance(self.dense, Dense), "a Dense"),
            ("max_body_bytes", type(self.max_body_bytes) is int, "a whole number of bytes"),
        ):
            if not good:
                value = _shown(getattr(self, name))
                raise ApplicationError(f"Application {self.name!r} has {name}={value}; it must be {fix}.")


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:80]


def is_url_safe(name: str) -> bool:
    """Check that a name has only letters, digits, `-` and `_`, and is short enough to name a file."""
    return 0 < len(name) <= MAX_NAME and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)


def _is_content_type(value: object) -> bool:
    return isinstance(value, str) and value.count("/") == 1 and value == value.lower().strip()


def describe(application: Application) -> dict[str, Any]:
    """The public description of an application, as JSON values."""
    live = application.live
    return {
        "name": application.name,
        "description": application.description,
        # One tensor of fixed size, or None.
        "input": None if isinstance(application.input, RecordSpec) else application.input.to_json(),
        "output": None if isinstance(application.output, RecordSpec) else application.output.to_json(),
        "inputs": [spec.to_json() for spec in application.inputs.values()],
        "outputs": [spec.to_json() for spec in application.outputs.values()],
        "raw": None if application.prepare is None else application.prepare.raw.to_json(),
        "recognition": None if application.recognition is None else application.recognition.to_json(),
        "dense": None if application.dense is None else application.dense.to_json(),
        "picture": application.decode.tensor if isinstance(application.decode, PictureFile) else "",
        "shows": None if application.shows is None else application.shows.to_json(),
        "accepts": _accepted_types(application),
        "max_body_bytes": application.max_body_bytes,
        "generate": None if application.generate is None else application.generate.to_json(),
        "live": None
        if live is None
        else {"rate_hz": live.rate_hz, "sound": is_sound(application.input), "speech": live.speech is not None},
    }


def _accepted_types(application: Application) -> list[str]:
    raw = "application/octet-stream"
    if isinstance(application.input, RecordSpec):
        # Several tensors have no raw form.
        return list(dict.fromkeys((*application.accepts, "application/json")))
    if application.live is None:
        return [*application.accepts, "application/json", raw]
    # For a whole recording.
    return [*WAV, raw] if is_sound(application.input) else [raw]


def unpacked(application: Application, answer: Array) -> Any:
    """Return one whole answer as `reply` takes it: an array, or several tensors as a dictionary of arrays by name.

    Args:
        application: The application.
        answer: One chunk of `application.answer`; a single tensor may be flat.
    """
    spec = application.answer
    if not isinstance(spec, RecordSpec):
        return answer.reshape(spec.shape)
    named = spec.unpack(answer)
    # One tensor has no need of a name, whether it is of one step or of several.
    return named if isinstance(application.output, RecordSpec) else named[application.output.name]


def reply_of(application: Application) -> Reply:
    """Return the application's `reply`, or the default: the output as nested lists."""
    return application.reply or _as_lists


def _as_lists(output: Any) -> Any:
    return {name: array.tolist() for name, array in output.items()} if isinstance(output, dict) else output.tolist()


def decoded_chunk(application: Application, raw: Any) -> Array:
    """Check what the `decode` of an application made of a body: one chunk of its input.

    Args:
        application: An application without a `prepare`.
        raw: What its `decode` gave.

    Raises:
        ApplicationError: `decode` returned a type, a name or a dtype that the application does not declare. No body can
            be valid then.
        InvalidInput: The lengths, the shape or the numbers of the body do not fit the input.
    """
    try:
        return application.input.check(raw)
    except InvalidInput:
        found = _other_kind(application.input, raw)
        if not found:
            raise
    several = "a dictionary of arrays by name" if isinstance(application.input, RecordSpec) else "an array"
    raise ApplicationError(
        f"the decode of {application.name!r} gives {found}; it must give {several}, {application.input.describe()}."
    )


def _other_kind(spec: ChunkSpec, raw: Any) -> str:
    """Say what is of another kind than the spec: a type, a name or a dtype; empty if only sizes or numbers differ."""
    if isinstance(spec, TensorSpec):
        specs, arrays = {spec.name: spec}, {spec.name: raw}
    elif isinstance(raw, Mapping):
        specs, arrays = spec.by_name, dict(cast(Mapping[Any, Any], raw))
    else:
        return f"a {type(raw).__name__}"
    for name, array in arrays.items():
        if name not in specs:
            return f"the name {name!r}"
        if not isinstance(array, np.ndarray):
            return f"a {type(array).__name__} for {name!r}"
        if cast(Array, array).dtype != specs[name].numpy_dtype:
            return f"{cast(Array, array).dtype} for {name!r}"
    return ""
