"""Packs whose answers take steps: the loop over two graphs, its ends, and what is refused."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.core.errors import InvalidInput, PackCorrupt
from penstock.core.machine.onnx_session import onnx_session
from penstock.core.packs.pack import GOLDEN, Pack, PackModel, pack_json, read_pack
from penstock.core.packs.pack_loop import PackLoop
from penstock.core.record import RecordSpec
from penstock.device.pack_engine import PackEngine
from tests.support.packs import colour_pack, sums_answer, sums_pack
from tests.unit.test_pack import rewritten

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return sums_pack(tmp_path_factory.mktemp("sums") / "pack")


@pytest.fixture(scope="module")
def engine(pack: Pack) -> PackEngine:
    return PackEngine(pack)


def inputs() -> Iterator[tuple[list[int], int, int]]:
    """Answers that end by a token, by the request's maximum, and by a full cache, of many lengths."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        yield rng.integers(0, 10, 1 + seed % 40).tolist(), seed % 5, int(rng.integers(1, 31))


def test_whole_answers_and_their_steps_are_those_of_a_loop_by_hand(engine: PackEngine) -> None:
    reasons = set[tuple[str, int]]()
    for digits, first, most in inputs():
        expected, ended = sums_answer(digits, first, most)
        given: dict[str, Any] = {"digits": digits, "first": first, "most": most}
        found = engine.predict(given)
        steps = engine.generate({name: np.asarray(each) for name, each in given.items()})
        assert steps.ended is None
        each = list(steps)
        assert steps.ended == ended
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
            np.testing.assert_array_equal(np.stack([step[name] for step in each]), array)
        reasons.add((ended, len(each)))
    assert ("max_steps", 20) in reasons
    assert len({steps for ended, steps in reasons if ended == "end"}) > 2
    assert any(ended == "max_steps" and steps < 20 for ended, steps in reasons)


def test_inputs_with_defaults_may_be_left_out(engine: PackEngine) -> None:
    np.testing.assert_array_equal(engine.predict({"digits": [3, 1, 4]})["token"], sums_answer([3, 1, 4])[0]["token"])


def test_two_answers_in_progress_do_not_disturb_each_other(engine: PackEngine) -> None:
    one, other = engine.generate({"digits": [1, 2, 3]}), engine.generate({"digits": [9] * 40, "first": 3})
    found: tuple[list[int], list[int]] = [], []
    for each in range(4):
        found[each % 2].append(int(next((one, other)[each % 2])["token"]))
    assert found[0] == sums_answer([1, 2, 3])[0]["token"][:2].tolist()
    assert found[1] == sums_answer([9] * 40, 3)[0]["token"][:2].tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"digits": [10]}, "digits"),
        ({"digits": []}, "digits has 0 length; it must have from 1 to 40"),
        ({"digits": [1], "most": 31}, "most"),
        ({"first": 3}, "The input 'digits' is missing"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_the_first_step(engine: PackEngine, given: Any, said: str) -> None:
    for call in (engine.predict, engine.generate):
        with pytest.raises(InvalidInput, match=said):
            call(given)


def test_a_pack_of_one_step_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"the pack 'colours' answers in one step; use predict\(\)"):
        PackEngine(colour_pack(tmp_path / "pack")).generate({})


def test_what_is_read_is_what_was_written(pack: Pack) -> None:
    assert read_pack(pack.folder).to_json() == pack.to_json()
    assert [file.name for file in pack.graphs()] == ["begin.onnx", "step.onnx"]


def altered(folder: Path, **changes: Any) -> Pack:
    """The pack with other golden numbers, hashed as if it had been written so."""
    pack = sums_pack(folder)
    golden = load_file(folder / GOLDEN)
    for name, number in changes.items():
        golden[f"outputs.{name}"].flat[0] += number
    save_file(golden, folder / GOLDEN)
    files = {**pack.files, GOLDEN: (pack.files[GOLDEN][0], (folder / GOLDEN).stat().st_size)}
    (folder / "pack.json").write_bytes(pack_json(replace(pack, files=files)))
    return replace(pack, files=files, tolerance=5.0)


def test_whole_numbers_of_golden_answers_must_be_equal_whatever_the_tolerance(tmp_path: Path) -> None:
    with pytest.raises(PackCorrupt, match="differs on its example 0 from the recorded answer in whole numbers"):
        PackEngine(altered(tmp_path / "token", token=1))
    PackEngine(altered(tmp_path / "sums", sums=1))


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(kind="oneshot"),
        lambda fields: fields.pop("generate"),
        lambda fields: fields["generate"].pop("state"),
        lambda fields: fields["generate"].update(max_steps_input="digits"),
        lambda fields: fields["models"]["fp32"].pop("step"),
        lambda fields: fields["models"]["fp32"].update(step="web/other.onnx"),
        lambda fields: fields.update(answers=1),
    ],
)
def test_a_description_that_is_inconsistent_is_refused(tmp_path: Path, change: Any) -> None:
    folder = tmp_path / "pack"
    sums_pack(folder)
    rewritten(folder, change)
    with pytest.raises(PackCorrupt, match=r"pack\.json is not readable"):
        read_pack(folder)


def test_a_damaged_step_is_found(tmp_path: Path) -> None:
    pack = sums_pack(tmp_path / "pack")
    step = pack.graphs()[1]
    step.write_bytes(step.read_bytes()[:-1] + b"?")
    with pytest.raises(PackCorrupt, match=r"step\.onnx is not the file that was written"):
        read_pack(pack.folder)
    assert PackModel(file="a", ms=1.0).files == ["a"]


SCRIPT = """
import { readFileSync } from "node:fs";
import { Generation } from "./generation.mjs";
class Tensor {
  constructor(dtype, data, dims) {
    Object.assign(this, { dtype, data, dims });
  }
}
const KINDS = { int64: [BigInt64Array, BigInt], float32: [Float32Array, Number], bool: [Uint8Array, Number] };
const tensors = (given) =>
  Object.fromEntries(
    given.map(([name, dtype, dims, numbers]) => {
      const [Kind, number] = KINDS[dtype];
      return [name, new Tensor(dtype, Kind.from(numbers, number), dims)];
    }),
  );
const numbers = (made) => Object.entries(made).map(([name, { data, dims }]) => [name, dims, Array.from(data, Number)]);
const { pack, answers } = JSON.parse(readFileSync(0, "utf8"));
for (const { begin, steps } of answers) {
  const seen = [];
  const sessions = {
    begin: { run: async () => tensors(begin.results) },
    step: {
      run: async (feeds) => {
        seen.push(numbers(feeds));
        return tensors(steps[seen.length - 1].results);
      },
    },
  };
  const generation = new Generation(pack, sessions, Tensor);
  await generation.begin(tensors(begin.feeds));
  const made = [];
  for (let ended = null; ended === null; ) {
    const step = await generation.step();
    ended = step.ended;
    made.push([Number(step.outputs.token.values[0]), ended]);
  }
  console.log(JSON.stringify({ seen, made }));
}
"""


class Recorded:
    """A graph whose runs are recorded: names, types, shapes and numbers in and out."""

    def __init__(self, session: Any) -> None:
        self.session, self.runs = session, list[dict[str, Any]]()

    def get_outputs(self) -> Any:
        return self.session.get_outputs()

    def run(self, names: list[str], feeds: Any) -> Any:
        results = self.session.run(names, feeds)
        sides = {"feeds": feeds, "results": dict(zip(names, results, strict=True))}
        self.runs.append(
            {
                side: [[name, str(each.dtype), [*each.shape], each.ravel().tolist()] for name, each in arrays.items()]
                for side, arrays in sides.items()
            }
        )
        return results


def test_a_browser_gives_the_graphs_the_same_numbers_in_the_same_room(pack: Pack, tmp_path: Path) -> None:
    node = which("node")
    if node is None:
        pytest.skip("there is no node here; tests/integration/test_device_web_generate.py compares a browser's answers")
    for name in ("generation", "tensors"):
        source = (ROOT / f"penstock/device/web/{name}.js").read_text()
        (tmp_path / f"{name}.mjs").write_text(source.replace("./tensors.js", "./tensors.mjs"))
    (tmp_path / "run.mjs").write_text(SCRIPT)
    answers, expected = list[Any](), list[Any]()
    for digits, first, most in [*inputs()][:12]:
        begin, step = (Recorded(onnx_session(file)) for file in pack.graphs())
        assert pack.generate is not None
        loop = PackLoop(begin_session=begin, step_session=step, tensors=pack.tensors, generate=pack.generate)
        given = RecordSpec(pack.inputs).from_numbers({"digits": digits, "first": first, "most": most})
        made = [[int(each.output["token"]), each.ended] for each in loop.steps(given)]
        answers.append({"begin": begin.runs[0], "steps": step.runs})
        seen = [{name: [dims, numbers] for name, _, dims, numbers in run["feeds"]} for run in step.runs]
        expected.append((seen, made))
    given = json.dumps({"pack": pack.to_json(), "answers": answers})
    done = subprocess.run([node, tmp_path / "run.mjs"], input=given, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [
        ([{name: [dims, numbers] for name, dims, numbers in run} for run in each["seen"]], each["made"])
        for each in found
    ] == expected
