"""The answer of a beam search, from the outputs of its steps."""

from penstock.core.spec import Array

# T steps, W beams


def best_beam(token_TW: Array, parent_TW: Array, end: int) -> list[int]:
    """Return the tokens of the best beam, without the end token.

    Args:
        token_TW: The newest token of each beam at each step, the best beam first, as `penstock.nn.decoding.Beam` gives
            them.
        parent_TW: The beam of the step before that each beam continues.
        end: The token that ends an answer.
    """
    beam, tokens = 0, list[int]()
    for token_W, parent_W in zip(token_TW[::-1], parent_TW[::-1], strict=True):
        tokens.append(int(token_W[beam]))
        beam = int(parent_W[beam])
    tokens.reverse()
    return tokens[: tokens.index(end)] if end in tokens else tokens
