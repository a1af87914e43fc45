"""A beam process and its front-end: any descriptor, answers that stop half-way, and restarts."""

import asyncio
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from penstock.core.speech.endpoint_beam import EndpointBeam, Redecoded
from penstock.core.speech.utterance_decoder import UtteranceFrames
from penstock.serve.frontend import beam_process as module
from penstock.serve.frontend.beam_process import BeamOutcome, BeamProcess

SYMBOLS = ("-", " ", "a", "b")
# "ab".
PROBABILITY_TV = np.array([[0.01, 0.01, 0.97, 0.01], [0.01, 0.01, 0.01, 0.97]])
FRAMES = UtteranceFrames(np.log(PROBABILITY_TV).astype(np.float16), np.arange(2, dtype=np.int32))
Found = tuple[Redecoded | None, BeamOutcome]


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Open so many that every further one is above those that `select.select` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2_048:
        pytest.skip(f"the machine lets a process have {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_048), hard))
    with ExitStack() as stack:
        null = -1
        while null < 1_024:
            null = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, null)
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def decoded(beams: BeamProcess, model: int, limit_s: float = 30.0) -> Found:
    """Decode an utterance; wait for a process that is being started again."""
    found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()

    def done(redecoded: Redecoded | None, outcome: BeamOutcome) -> None:
        found.set_result((redecoded, outcome))

    while beams.submit(model, FRAMES, (), limit_s, done) is None:
        await asyncio.sleep(0.01)
    return await found


def test_descriptors_above_1023_work(many_descriptors: None) -> None:
    beams = BeamProcess()
    model = beams.add(SYMBOLS, EndpointBeam(frame_s=0.02), None, "")
    try:
        redecoded, outcome = asyncio.run(decoded(beams, model))
    finally:
        beams.close()
    assert outcome is BeamOutcome.DECODED
    assert redecoded is not None
    assert redecoded.text == "ab"
    assert (beams.starts, beams.restarts) == (1, 0)


def test_an_answer_that_stops_half_way_takes_no_longer_than_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    # The first process answers half of what it should; the next ones are real.
    (tmp_path / "half.py").write_text(
        "import os, runpy, sys, time\n"
        "if os.path.exists(sys.argv[1]):\n"
        "    runpy.run_module('penstock.serve.frontend.beam_main', run_name='__main__')\n"
        "else:\n"
        "    from penstock.serve.frontend.beam_main import message_of, read_message\n"
        "    open(sys.argv[1], 'w').close()\n"
        "    read_message(sys.stdin.buffer.read)\n"
        "    os.write(1, message_of({}))\n"
        "    open(sys.argv[1] + '-loaded', 'w').close()\n"
        "    read_message(sys.stdin.buffer.read)\n"
        "    os.write(1, message_of({'text': 'ab', 'words': []})[:12])\n"
        "    time.sleep(600)\n"
    )
    beams = BeamProcess((sys.executable, str(tmp_path / "half.py"), str(tmp_path / "begun")))
    model = beams.add(SYMBOLS, EndpointBeam(frame_s=0.02), None, "")

    async def all_of_them() -> list[Found]:
        # An utterance whose time is over while the process loads its model is not sent to it.
        while not (tmp_path / "begun-loaded").exists():
            await asyncio.sleep(0.01)
        found = [await decoded(beams, model, 2.0)]
        # On a busy machine the first one may be late before the process has begun with it.
        while beams.starts < 2:
            await asyncio.sleep(0.1)
            if beams.starts < 2:
                found.append(await decoded(beams, model, 2.0))
        return [*found, await decoded(beams, model)]

    try:
        (_, first), *_, (redecoded, last) = asyncio.run(all_of_them())
    finally:
        beams.close()
    assert (first, last) == (BeamOutcome.LATE, BeamOutcome.DECODED)
    assert redecoded is not None
    assert (beams.starts, beams.restarts) == (2, 1)
