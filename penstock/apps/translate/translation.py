"""Translation of many texts at once in Python, without a server: for evaluation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.apps.translate.tokenizer import END, PADDING
from penstock.core.beams import best_beam
from penstock.core.subwords import Subwords
from penstock.nn.decoding import Beam, Decoding

# B texts, S source tokens, W beams

MAX_STEPS = 160
# Rows of the cache are added in blocks, since each addition copies it.
ROOM = 32


def translate(network: Decoding, texts: Sequence[str], tokenizer: Subwords, *, batch: int = 64) -> list[str]:
    """Translate texts.

    Args:
        network: The translator, with a greedy choice or beam search, on its device.
        texts: English texts.
        tokenizer: The tokenizer of its training.
        batch: Texts at once.

    Returns:
        A Spanish text for each.
    """
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    made = [""] * len(texts)
    network.eval()
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        tokens = [tokenizer.encode(texts[index]) for index in chosen]
        for index, answer in zip(chosen, answers(network, tokens), strict=True):
            made[index] = tokenizer.decode(answer)
    return made


@torch.inference_mode()
def answers(network: Decoding, sources: Sequence[list[int]], max_steps: int | None = None) -> list[list[int]]:
    """Generate the answers of a batch of token sequences, without their end tokens."""
    max_steps = MAX_STEPS if max_steps is None else max_steps
    device = next(network.parameters()).device
    longest = max(1, *(len(source) for source in sources)) if sources else 1
    padded = [[*source, *[PADDING] * (longest - len(source))] for source in sources]
    lengths_B = torch.tensor([len(source) for source in sources], device=device)
    state = network.begin(tokens=torch.tensor(padded, device=device).reshape(-1, longest), source=lengths_B)
    done_B = torch.zeros(len(sources), dtype=torch.bool, device=device)
    ends_B = torch.full((len(sources),), max_steps, device=device)
    outputs: list[dict[str, Tensor]] = []
    for step in range(max_steps):
        if step % ROOM == 0:
            state = {**state, "cache": _with_room(state["cache"])}
        output, state, ended_B = network.step(state)
        outputs.append(output)
        ends_B = torch.where(ended_B & ~done_B, step + 1, ends_B)
        done_B |= ended_B
        if bool(done_B.all()):
            break
    steps = {name: torch.stack([output[name] for output in outputs], 1).cpu().numpy() for name in outputs[0]}
    found: list[list[int]] = []
    for row, end in enumerate(ends_B.tolist()):
        if isinstance(network, Beam):
            found.append(best_beam(steps["token"][row, :end], steps["parent"][row, :end], END))
        else:
            tokens = steps["token"][row, :end].tolist()
            found.append(tokens[: tokens.index(END)] if END in tokens else tokens)
    return found


def _with_room(cache: Tensor) -> Tensor:
    return functional.pad(cache, (0, 0, 0, ROOM))
