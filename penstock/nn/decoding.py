"""Choice of tokens: greedy, by sampling, or by beam search, around a decoder that scores the next token.

A decoder is an `nn.Module` with two functions:

- `begin(**inputs) -> state`: a dictionary of tensors `[B, ...]`;
- `scores(state, token_B) -> (logits_BV, state)`: the scores of the token after `token_B`.

Each wrapper adds `begin` and `step(state) -> (output, state, done)`, the methods of an answer that takes steps. They
use only tensor operations that treat rows independently: they export to ONNX, and an answer does not depend on its
batch.
`forward` is the decoder's, which training calls.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError

# B rows, W beams of a row, V vocabulary, K most probable tokens

State = dict[str, Tensor]
# The output, the new state, and whether each row has ended, [B].
Step = tuple[dict[str, Tensor], State, Tensor]
# Below every score, and finite: infinity minus infinity is NaN.
_LOWEST = -1e9


class Decoder(Protocol):
    """The functions that the wrappers ask of a network."""

    def begin(self, *args: Tensor, **inputs: Tensor) -> State:
        """Make the state before the first token."""
        ...

    def scores(self, state: Mapping[str, Tensor], token: Tensor) -> tuple[Tensor, State]:
        """Take the newest token, `[B]`; returns the scores of the next one, `[B, V]`, and the new state."""
        ...


class Decoding(nn.Module):
    """A decoder, and a way to choose its tokens.

    Args:
        decoder: A module with `begin` and `scores`.
        first: The token that stands for the beginning of an answer.
        end: The token that ends an answer.

    Raises:
        ApplicationError: The module lacks one of these functions.
    """

    # Inputs of `begin` beside the decoder's.
    own_inputs: tuple[str, ...] = ()

    def __init__(self, decoder: nn.Module, *, first: int, end: int) -> None:
        super().__init__()
        for name in ("begin", "scores"):
            if not callable(getattr(decoder, name, None)):
                raise ApplicationError(
                    f"{type(self).__name__} got a {type(decoder).__name__}, which has no {name}; a decoder has "
                    f"begin(**inputs) and scores(state, token)."
                )
        self.decoder = decoder
        self.first, self.end = first, end

    def forward(self, *args: Any, **named: Any) -> Any:
        """Call the decoder, for training."""
        return self.decoder(*args, **named)

    @property
    def forward_signature(self) -> inspect.Signature:
        """The signature of the decoder's `forward`, by which training finds which tensors and lengths it takes."""
        return inspect.signature(self.decoder.forward)

    @property
    def begin(self) -> Callable[..., State]:
        """The function that makes the state before the first token.

        It takes the inputs of the decoder's `begin` and those of `own_inputs`, and has their signature, by which
        Penstock finds which tensors and lengths a network takes.
        """

        def begin(*args: Tensor, **inputs: Tensor) -> State:
            own = {name: inputs.pop(name) for name in self.own_inputs if name in inputs}
            state = self._decoder.begin(*args, **inputs)
            made = self._begun(state, *_rows_of(state), **own)
            if shared := sorted(made.keys() & state.keys() - own.keys()):
                raise ApplicationError(
                    f"the decoder's state has {shared[0]!r}, which {type(self).__name__} needs for itself; give it "
                    f"another name."
                )
            return self._joined(state, made)

        signature = inspect.signature(self._decoder.begin)
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self.own_inputs]
        begin.__dict__["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *own])
        return begin

    @abstractmethod
    def step(self, state: Mapping[str, Tensor]) -> Step:
        """Take one step.

        Returns:
            The output, the new state, and whether each row has ended, `[B]`; the output of that step is the last.
        """

    @abstractmethod
    def _begun(self, state: State, rows: int, device: torch.device, **own: Tensor) -> State:
        """Return the wrapper's own part of the first state."""

    def _joined(self, state: State, made: State) -> State:
        return {**state, **made}

    @property
    def _decoder(self) -> Decoder:
        return cast(Decoder, self.decoder)


@final
class Greedy(Decoding):
    """Chooses the most probable token at each step.

    The output is `token`, int64 `[B]`; the end token is the last. The state is the decoder's, and `token` `[B]`.
    """

    def _begun(self, state: State, rows: int, device: torch.device, **own: Tensor) -> State:
        return {"token": torch.full((rows,), self.first, dtype=torch.int64, device=device)}

    def step(self, state: Mapping[str, Tensor]) -> Step:
        """See `Decoding`."""
        logits_BV, inner = self._decoder.scores(_without(state, ("token",)), state["token"])
        token = logits_BV.argmax(-1)
        return {"token": token}, {**inner, "token": token}, token == self.end


@final
class Sampled(Decoding):
    """Draws each token from its probabilities.

    The random numbers of a request follow from its `seed` and the number of the step alone: the same seed gives the
    same answer in any batch, on any server, and in an exported graph.

    `begin` takes `seed`, int64 `[B]`, beside the decoder's inputs. The output is `token`, int64 `[B]`. The state is the
    decoder's, and `token`, `seed` and `count`, int64 `[B]`.

    Args:
        decoder: As of `Decoding`.
        first: As of `Decoding`.
        end: As of `Decoding`.
        temperature: Scores are divided by it: below 1, probable tokens are drawn more often.
        top_k: Draw from this many most probable tokens; None for all.
        top_p: Draw from the fewest tokens whose probabilities sum to this much (Holtzman et al. 2020, "The Curious Case
            of Neural Text Degeneration"); 1 for all.

    Raises:
        ApplicationError: A number is out of range.
    """

    own_inputs = ("seed",)

    def __init__(
        self,
        decoder: nn.Module,
        *,
        first: int,
        end: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
    ) -> None:
        super().__init__(decoder, first=first, end=end)
        if not 0 < temperature < float("inf"):
            raise ApplicationError(f"Sampled has temperature={temperature}; it must be above 0. Use Greedy for 0.")
        if top_k is not None and top_k < 1:
            raise ApplicationError(f"Sampled has top_k={top_k}; it must be 1 or more, or None.")
        if not 0 < top_p <= 1:
            raise ApplicationError(f"Sampled has top_p={top_p}; it must be above 0, and 1 at most.")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p

    def _begun(self, state: State, rows: int, device: torch.device, **own: Tensor) -> State:
        count = torch.zeros(rows, dtype=torch.int64, device=device)
        return {"token": torch.full_like(count, self.first), "seed": own["seed"], "count": count}

    def step(self, state: Mapping[str, Tensor]) -> Step:
        """See `Decoding`."""
        logits_BV, inner = self._decoder.scores(_without(state, ("token", "seed", "count")), state["token"])
        token = self._drawn(logits_BV.float() / self.temperature, uniform(state["seed"], state["count"]))
        state = {**inner, "token": token, "seed": state["seed"], "count": state["count"] + 1}
        return {"token": token}, state, token == self.end

    def _drawn(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        if self.top_k is None and self.top_p == 1:
            return _inverse(logits_BV.softmax(-1), uniform_B)
        best_BK, tokens_BK = logits_BV.topk(min(self.top_k or logits_BV.shape[1], logits_BV.shape[1]), -1)
        share_BK = best_BK.softmax(-1)
        # Those before it do not reach the sum yet; the most probable token is always kept.
        kept_BK = share_BK.cumsum(-1) - share_BK < self.top_p
        place_B = _inverse(torch.where(kept_BK, share_BK, 0), uniform_B)
        return tokens_BK.gather(1, place_B[:, None]).squeeze(1)


@final
class Beam(Decoding):
    """Beam search: keeps the W best beginnings of an answer, and takes the best whole one.

    The answer is known at the end alone, so a step does not give its next token, and clients cannot read it as it
    comes. The outputs are `token` and `parent`, int64 `[B, W]`: the newest token of each beam, and the beam of the step
    before that it continues. From the outputs of all steps, `penstock.core.beams.best_beam` makes the tokens of the
    answer; call it in `reply`.

    An answer of n tokens, the end token included, has the score `log probability / n ** length_penalty`. Search ends
    when the best beam is a whole answer. Without a length penalty no other could overtake it then.

    The state is that of the decoder `[B, W, ...]`, except for the names in `shared`; and `token`, `score`, `count` and
    `ended`, `[B, W]`.

    Args:
        decoder: As of `Decoding`.
        first: As of `Decoding`.
        end: As of `Decoding`.
        beams: W.
        length_penalty: 0 prefers short answers; 1 is the mean log-probability of a token.
        shared: Names of the decoder's state that are equal in all beams of a row, and stay `[B, ...]`: those made from
            the inputs, and all lengths. A step is given the lengths of the inputs under the names of their `Dim`,
            also where `begin` does not return them.

    Raises:
        ApplicationError: A number is out of range.
    """

    def __init__(
        self,
        decoder: nn.Module,
        *,
        first: int,
        end: int,
        beams: int = 4,
        length_penalty: float = 1.0,
        shared: tuple[str, ...] = (),
    ) -> None:
        super().__init__(decoder, first=first, end=end)
        if beams < 1:
            raise ApplicationError(f"Beam has beams={beams}; it must be 1 or more.")
        if length_penalty < 0:
            raise ApplicationError(f"Beam has length_penalty={length_penalty}; it must be 0 or more.")
        self.beams, self.length_penalty, self.shared = beams, length_penalty, shared

    def _begun(self, state: State, rows: int, device: torch.device, **own: Tensor) -> State:
        count = torch.zeros(rows, self.beams, dtype=torch.int64, device=device)
        at_W = torch.arange(self.beams, device=device)
        return {
            "token": torch.full_like(count, self.first),
            # All beams are equal at first; one of them goes on.
            "score": torch.where(at_W == 0, 0.0, _LOWEST).expand(rows, -1).contiguous(),
            "count": count,
            "ended": torch.zeros_like(count, dtype=torch.bool),
        }

    def _joined(self, state: State, made: State) -> State:
        return {name: part if name in self.shared else self._repeated(part) for name, part in state.items()} | made

    def _repeated(self, part_B: Tensor) -> Tensor:
        return part_B[:, None].expand(-1, self.beams, *part_B.shape[1:]).contiguous()

    def step(self, state: Mapping[str, Tensor]) -> Step:
        """See `Decoding`."""
        rows = state["token"].shape[0]
        inner = _without(state, ("token", "score", "count", "ended"))
        self._check_shared(inner)
        flat = {
            name: (self._repeated(part) if name in self.shared else part).flatten(0, 1) for name, part in inner.items()
        }
        logits_FV, flat = self._decoder.scores(flat, state["token"].flatten())
        inner = {name: part.unflatten(0, (rows, self.beams)) for name, part in flat.items()}
        score_BWV, count_BWV = self._continued(state, logits_FV.unflatten(0, (rows, self.beams)))
        rank_BWV = score_BWV / count_BWV.float() ** self.length_penalty
        best_BW = rank_BWV.flatten(1).topk(self.beams, -1).indices
        parent, token = best_BW // logits_FV.shape[-1], best_BW % logits_FV.shape[-1]
        ended = token == self.end
        row_B1 = torch.arange(rows, device=token.device)[:, None]
        kept = {name: part[:, 0] if name in self.shared else part[row_B1, parent] for name, part in inner.items()}
        kept |= {
            "token": token,
            "score": score_BWV.flatten(1).gather(1, best_BW),
            "count": count_BWV.flatten(1).gather(1, best_BW),
            "ended": ended,
        }
        return {"token": token, "parent": parent}, kept, ended[:, 0]

    def _check_shared(self, inner: State) -> None:
        # The lengths of the inputs come with the first step.
        if unknown := [name for name in self.shared if name not in inner]:
            raise ApplicationError(
                f"Beam has {unknown[0]!r} in shared, and the state of a step has {', '.join(inner)}; name one of these."
            )
        if single := [name for name, part in inner.items() if part.ndim < 2 and name not in self.shared]:
            raise ApplicationError(
                f"Beam gets {single[0]!r} with one number for each row, {list(inner[single[0]].shape)}, and not for "
                f"each of its {self.beams} beams; name it in shared, as all lengths."
            )

    def _continued(self, state: Mapping[str, Tensor], logits_BWV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the length of each beam with each token. Whole answers stay as they are."""
        is_end_V = torch.arange(logits_BWV.shape[-1], device=logits_BWV.device) == self.end
        ended = state["ended"][..., None]
        whole_V = torch.where(is_end_V, 0.0, 2 * _LOWEST)
        more = torch.where(ended, whole_V, logits_BWV.float().log_softmax(-1))
        score = (state["score"][..., None] + more).clamp(min=2 * _LOWEST)
        count = state["count"][..., None] + torch.where(ended, 0, 1)
        return score, count.expand_as(score)


def uniform(seed_B: Tensor, count_B: Tensor) -> Tensor:
    """Random numbers from 0 to below 1 with 24 bits, float32 `[B]`, made of a seed and a counter.

    A counter-based generator, as in Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", with a 32-bit
    integer hash of the kind of MurmurHash3's finalizer.

    Args:
        seed_B: Any int64, `[B]`.
        count_B: 0, 1, 2, ..., `[B]`.
    """
    # The sign apart, since ONNX shifts numbers without one alone.
    high_B = ((seed_B & (_LOW << 32 & _POSITIVE)) >> 32) + torch.where(seed_B < 0, 1 << 31, 0)
    mixed = _mixed(seed_B & _LOW)
    mixed = _mixed(mixed ^ high_B)
    mixed = _mixed(mixed ^ (count_B & _LOW))
    return (mixed >> 8).float() / (1 << 24)


_LOW, _POSITIVE = (1 << 32) - 1, (1 << 63) - 1
# Below 2 ** 31, so that no product leaves int64.
_FACTORS = 0x7FEB352D, 0x2C1B3C6D, 0x297A2D39


def _mixed(words_B: Tensor) -> Tensor:
    for shift, factor in zip((16, 15, 16), _FACTORS, strict=True):
        words_B = (words_B ^ (words_B >> shift)) * factor & _LOW
    return words_B ^ (words_B >> 15)


def _inverse(shares_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first place whose cumulated share exceeds a uniform number, `[B]`."""
    cumulated_BV = shares_BV.cumsum(-1)
    wanted_B1 = uniform_B[:, None] * cumulated_BV[:, -1:]
    # Rounding may make both equal at the end; a place without a share is never drawn.
    last_B = (shares_BV > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum((cumulated_BV <= wanted_B1).long().sum(-1), last_B)


def _rows_of(state: Mapping[str, Tensor]) -> tuple[int, torch.device]:
    some = next(iter(state.values()))
    return some.shape[0], some.device


def _without(state: Mapping[str, Tensor], names: tuple[str, ...]) -> State:
    return {name: part for name, part in state.items() if name not in names}
