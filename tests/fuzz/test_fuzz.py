"""Each parser with a few thousand inputs, the same ones every time; `tests.fuzz.run` goes on."""

import random
from itertools import islice

import pytest

from tests.fuzz.mutate import CORPUS, mutations, seeds_of
from tests.fuzz.targets import TARGETS
from tests.support.thorough import thorough

# As many as about a second takes.
INPUTS = dict.fromkeys(TARGETS, 4_000) | {"golden": 500, "manifest": 500, "reader": 3_000, "shared": 300}
THOROUGH = {"frames", "listen", "manifest", "reader"}


@pytest.mark.parametrize(("name", "file"), [(file.parent.name, file.name) for file in sorted(CORPUS.glob("*/*"))])
def test_every_input_of_the_corpus_is_taken_or_refused(name: str, file: str) -> None:
    TARGETS[name]((CORPUS / name / file).read_bytes())


@pytest.mark.parametrize("name", [thorough(name) if name in THOROUGH else name for name in TARGETS])
def test_changed_inputs_are_taken_or_refused(name: str) -> None:
    for data in islice(mutations(seeds_of(name), random.Random(0)), INPUTS[name]):
        try:
            TARGETS[name](data)
        except BaseException as error:
            error.add_note(f"replay: TARGETS[{name!r}]({data!r})")
            raise


def test_every_target_has_a_corpus() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
