"""The chain: applications whose outputs feed one another within one request, declared once.

Each part stays an application of its own, with its bundle, its batches and its metrics.
`penstock.core.chains.chain_run` runs the steps, in a server and in process alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.core.application import Application, Decode, Reply, is_url_safe
from penstock.core.chains.chain_fit import misfit, raw_as_tensor
from penstock.core.errors import ApplicationError
from penstock.core.pictures.boxes import Boxes
from penstock.core.record import ChunkSpec
from penstock.core.spec import TensorSpec
from penstock.core.streams.segments import Segments

# A function of a chain: the results of the steps before by their names, and the chain's input.
StepFunction = Callable[[Mapping[str, Any], Any], Any]

MAX_STEPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainStep:
    """One step of a chain: a part, which is an application of its own, or a Python function.

    Functions run in the front-end, on NumPy arrays and without torch. They take the results of the steps before as a
    dictionary by step name, and the chain's input. A result is one output array, or a dictionary of arrays by name
    where the part has several outputs or lengths vary.

    Args:
        part: The application, or the name under which it is served. The specs of an application are checked when the
            chain is declared, those of a name when it is served.
        run: A function with any result, instead of a part: a search in an index, a conversion. It runs in a thread.
        name: Name of the step among the results; by default that of the part or of the function.
        feed: Makes the part's one chunk, or one raw array for its `prepare`. Without it the part takes the output of
            the step before, or the chain's input if it is the first.
        each: Makes a list of chunks or raw arrays of any length instead, such as the crops of a picture. The result is
            a list of outputs in the same order. Every chunk is a row of its own in the part's batches.
        partial: Whether the request goes on if some of the chunks of `each` are rejected; their results are None.
        weights: SHA-256 of the weights that the part must have, as that of an index; by default any.

    Raises:
        ApplicationError: Fields that do not go together, or of another kind.
    """

    part: Application | str | None = None
    run: StepFunction | None = None
    name: str = ""
    feed: StepFunction | None = None
    each: StepFunction | None = None
    partial: bool = False
    weights: str = ""

    def __post_init__(self) -> None:
        if (self.part is None) == (self.run is None):
            raise ApplicationError(f"Step {self.name!r} needs either a part or a function to run; give one of them.")
        if self.part is not None and not isinstance(self.part, Application) and not is_name(self.part):
            raise ApplicationError(
                f"Step {self.name!r} has part={_shown(self.part)}; give an Application, or the name under which it is "
                f"served: letters, digits, '-' and '_'."
            )
        if not self.name:
            object.__setattr__(self, "name", self.part_name or getattr(self.run, "__name__", ""))
        if not isinstance(self.name, str) or not self.name:
            raise ApplicationError(f"A step has name {_shown(self.name)}; give it a text.")
        for field_name in ("run", "feed", "each"):
            value = getattr(self, field_name)
            if value is not None and not callable(value):
                raise ApplicationError(
                    f"Step {self.name!r} has {field_name}={_shown(value)}; it must be a function of the results and "
                    f"the chain's input."
                )
        wrong = next((each for each in ("feed", "each", "weights") if getattr(self, each) and self.part is None), "")
        if wrong:
            raise ApplicationError(f"Step {self.name!r} runs a function and has {wrong}; only a part has it.")
        if self.feed is not None and self.each is not None:
            raise ApplicationError(f"Step {self.name!r} has feed and each; feed gives one chunk, each gives a list.")
        if self.partial and self.each is None:
            raise ApplicationError(f"Step {self.name!r} is partial without each; only a list can have gaps.")

    @property
    def part_name(self) -> str:
        """Name of the part; empty for a function."""
        return self.part.name if isinstance(self.part, Application) else self.part or ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Applications that feed one another within one request and one latency budget.

    Args:
        name: Its name in URLs: letters, digits, `-` and `_`.
        steps: The steps in their order; at least one is a part.
        segments: For a chain whose first part is live: what of its events feeds the next step. What follows describes
            the way of one segment through the later steps then: their input, by default that of the part after the
            live one, and the answer.
        join: Makes the answer of all results and the chain's input: one array, or a dictionary of arrays by name. By
            default it is the result of the last step.
        input: What a request carries; the short form of `inputs` for one tensor. By default the input of the first
            part; where that has a `prepare`, its raw array, of any size up to its largest.
        inputs: The tensors of a request by name.
        output: The answer; the short form of `outputs`. By default the output of the last part.
        outputs: The tensors of the answer by name; needed with `join`, and where the last step is a function.
        decode: As in `Application`; by default that of the first part.
        accepts: The content types that `decode` reads.
        reply: Turns the answer into the JSON values of the response; by default that of the last part where its output
            is the answer, otherwise the answer as nested lists.
        shows: For outputs that are boxes in the picture of a request, in its own pixels: the answer to a picture has
            those with a score of `least` or more, and the server's page draws them over it.
        max_body_bytes: A larger request body is refused with 413; by default as for the first part.
        description: One sentence for people.

    Raises:
        ApplicationError: A field is out of range, two steps have one name, or a step does not fit the one before.
    """

    name: str
    steps: tuple[ChainStep, ...]
    segments: Segments | None = None
    join: StepFunction | None = None
    input: TensorSpec | None = None
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    output: TensorSpec | None = None
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    decode: Decode | None = None
    accepts: tuple[str, ...] = ()
    reply: Reply | None = None
    shows: Boxes | None = None
    max_body_bytes: int | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ApplicationError(f"Chain has name {_shown(self.name)}; use letters, digits, '-' and '_'.")
        steps = self.steps
        if not isinstance(steps, tuple) or not all(isinstance(step, ChainStep) for step in steps):
            raise ApplicationError(f"Chain {self.name!r} has steps={_shown(steps)}; give a tuple of ChainStep objects.")
        if not self.parts or len(steps) > MAX_STEPS:
            found = f"{len(steps)} steps" if self.parts else "no part"
            raise ApplicationError(
                f"Chain {self.name!r} has {found}; give 1 to {MAX_STEPS} steps, one a part at least."
            )
        names = [step.name for step in steps]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ApplicationError(f"Chain {self.name!r} has two steps of name {twice!r}; give one another name.")
        if self.name in self.parts:
            raise ApplicationError(f"Chain {self.name!r} has the name of one of its parts; give it a name of its own.")
        if self.segments is None:
            self._check_order()
        else:
            self._check_segments()
        if self.shows is not None:
            self._check_shown(self.shows)
        known = {step.part_name: step.part for step in steps if isinstance(step.part, Application)}
        self._check_known(known)
        if set(known) == set(self.parts):
            self.declare(known)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, each once."""
        return tuple(dict.fromkeys(step.part_name for step in self.steps if step.part_name))

    @property
    def later(self) -> "Chain":
        """The way of one segment: the steps after the live part, as a chain of single requests."""
        return replace(self, steps=self.steps[1:], segments=None)

    def check_parts(self, parts: Mapping[str, Application]) -> None:
        """Check that applications are the parts that the chain declares, and fit one another.

        Args:
            parts: An application for each name in `parts`.

        Raises:
            ApplicationError: They do not.
        """
        for step in self.steps:
            if not isinstance(step.part, Application):
                continue
            for side in ("input", "answer"):
                now, then = getattr(parts[step.part_name], side), getattr(step.part, side)
                if now != then:
                    raise ApplicationError(
                        f"Chain {self.name!r} declares {step.part_name!r} with {side} {then.describe()}, but it is "
                        f"served with {now.describe()}; serve a bundle of the declared application."
                    )
        self._check_known(parts)

    def declare(self, parts: Mapping[str, Application]) -> Application:
        """Return the chain as one application: its specs, `decode` and `reply`, without a network.

        Args:
            parts: An application for each name in `parts`.

        Raises:
            ApplicationError: The inputs and outputs of the chain do not make an application.
        """
        first = parts[self.parts[0]]
        if self.segments is not None:
            self.later.declare(parts)
            return replace(first, name=self.name, description=self.description, model=_NO_NETWORK, recipe=None)
        decode, accepts = (self.decode, self.accepts) if self.decode is not None else (first.decode, first.accepts)
        inputs = _named("input", self.input, self.inputs)
        if not inputs:
            inputs = first.inputs
            if self.takes_raw(parts):
                assert first.prepare is not None, first
                tensor = raw_as_tensor(first.prepare.raw)
                inputs = {tensor.name: tensor}
                decode = None if decode is None else _raw_by_name(decode, tensor.name)
        elif self.decode is None:
            # The first part's decode gives arrays of its own specs.
            decode, accepts = None, ()
        last, outputs = parts.get(self.steps[-1].part_name), _named("output", self.output, self.outputs)
        reply = self.reply
        if self.join is None and last is not None:
            outputs, reply = {spec.name: spec for spec in last.answer.tensors}, self.reply or last.reply
        shared = sorted(inputs.keys() & outputs.keys())
        if shared:
            raise ApplicationError(
                f"Chain {self.name!r} has an input and an output with the name {shared[0]!r}; give it a join and "
                f"outputs of another name."
            )
        made = Application(
            name=self.name,
            inputs=inputs,
            outputs=outputs,
            model=_NO_NETWORK,
            decode=decode,
            accepts=accepts if decode is not None else (),
            reply=reply,
            max_body_bytes=_WITHOUT_LIMIT,
            description=self.description,
        )
        if self.shows is not None and made.decode is None:
            self._refuse("has shows and no decode, by which a request could carry a picture; leave shows out")
        limit = first.max_body_bytes if self.max_body_bytes is None else self.max_body_bytes
        return replace(made, max_body_bytes=max(limit, made.input.nbytes))

    def takes_raw(self, parts: Mapping[str, Application]) -> bool:
        """True where a request carries the raw array of the first part's `prepare`."""
        first = parts[self.parts[0]]
        return self.input is None and not self.inputs and self.decode is None and first.prepare is not None

    def _check_order(self) -> None:
        first, last = self.steps[0], self.steps[-1]
        declares_input = self.input is not None or bool(self.inputs)
        declares_output = self.output is not None or bool(self.outputs)
        if first.part is None and not declares_input:
            self._refuse(f"begins with the function {first.name!r} and declares no input; give input=TensorSpec(...)")
        if self.decode is not None and not (self.accepts and declares_input):
            self._refuse("has a decode without accepts or without an input; declare what it reads and gives")
        if self.join is not None or last.run is not None:
            if not declares_output:
                made = "a join" if self.join is not None else f"the function {last.name!r} at its end"
                self._refuse(f"has {made} and no output; give output=TensorSpec(...), or outputs")
        elif declares_output:
            self._refuse(f"declares an output, but answers with that of {last.name!r}; give a join, or leave it out")
        elif last.each is not None:
            self._refuse(f"ends with the list of {last.name!r}; give a join that makes one answer of it")
        for before, step in zip(self.steps, self.steps[1:], strict=False):
            if step.part is None or step.feed is not None or step.each is not None:
                continue
            if before.run is not None or before.each is not None:
                gives = "a list" if before.run is None else "any value"
                self._refuse(f"feeds {step.name!r} with {before.name!r}, which gives {gives}; give the step a feed")

    def _check_segments(self) -> None:
        first = self.steps[0]
        if not isinstance(self.segments, Segments):
            self._refuse(f"has segments={_shown(self.segments)}; give Segments(find=...)")
        if first.part is None or first.feed is not None or first.each is not None:
            self._refuse(f"has segments, but its first step {first.name!r} is not the live part alone; give it no feed")
        if first.part_name in [step.part_name for step in self.steps[1:]]:
            self._refuse(f"has the live part {first.part_name!r} twice; a live part is the first step alone")
        if not any(step.part_name for step in self.steps[1:]):
            self._refuse(f"has no part after the live {first.part_name!r}; give one that takes its segments")
        if self.decode is not None or self.max_body_bytes is not None:
            self._refuse("has segments, which no request carries; leave decode and max_body_bytes out")
        self.later  # noqa: B018

    def _check_shown(self, shows: Boxes) -> None:
        if not isinstance(shows, Boxes):
            self._refuse(f"has shows={_shown(shows)}; it must be a Boxes")
        outputs = _named("output", self.output, self.outputs)
        if self.segments is not None or self.reply is not None or not outputs:
            self._refuse(
                "has shows, which needs a picture as its input and the three outputs of a join or of a last function, "
                "and neither segments nor reply; leave shows out"
            )
        shows.check(outputs, scaled=False)

    def _check_known(self, known: Mapping[str, Application]) -> None:
        known = {name: known[name] for name in self.parts if name in known}
        if self.segments is not None:
            name = self.steps[0].part_name
            if (live := known.get(name)) is not None and live.live is None:
                self._refuse(f"has segments, but {name!r} is not live; begin with a live part, or leave segments out")
            self.later._check_known(known)
            return
        live = next((name for name, part in known.items() if part.live is not None), None)
        if live is not None:
            self._refuse(
                f"has the live application {live!r}; a live part is the first of a chain alone, with "
                f"segments=Segments(find=...), which makes the next step's inputs of its events"
            )
        given = _named("input", self.input, self.inputs)
        before: tuple[str, ChunkSpec] | None = None
        if given:
            # As an application would have it.
            before = (
                "the chain's input",
                Application(
                    name=self.name, inputs=given, outputs=_ANY_OUTPUT, model=_NO_NETWORK, max_body_bytes=_WITHOUT_LIMIT
                ).input,
            )
        for step in self.steps:
            part = known.get(step.part_name)
            if part is not None and before is not None and step.feed is None and step.each is None:
                title, spec = before
                if reason := misfit(spec, part.input):
                    self._refuse(
                        f"feeds {step.name!r} with {title}, which does not fit: {reason}; give the step a feed"
                    )
            before = None if part is None else (f"the output of {step.name!r}", part.answer)

    def _refuse(self, problem: str) -> None:
        raise ApplicationError(f"Chain {self.name!r} {problem}.")


_NO_NETWORK = ":none"
_WITHOUT_LIMIT = 1 << 62
_ANY_OUTPUT = {"_output": TensorSpec(dtype="bool", shape=(), meaning="")}


def is_name(value: object) -> bool:
    """True for a text that is valid in a URL."""
    return isinstance(value, str) and is_url_safe(value)


def _named(side: str, one: TensorSpec | None, several: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
    if one is not None and several:
        raise ApplicationError(f"A chain has {side} and {side}s; give one of them.")
    return several if one is None else {one.name or side: one}


def _raw_by_name(decode: Decode, name: str) -> Decode:
    return lambda body, content_type: {name: decode(body, content_type)}


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:80]
