"""Template of the file that declares a text classifier."""

import json
from pathlib import Path

from penstock.apps.tab_lines import read_tab_lines
from penstock.core.errors import ApplicationError

MIN_TEXTS = 2
FILE = '''\
"""Classify texts of any length.

penstock train {file} --out runs/{name}
"""

from penstock import Application, ByteText, Dim, TensorSpec

# Longer texts are cut; the network computes only as much as a text has.
MAX_BYTES = 512
LABELS = (
{labels}
)


def network():
    from penstock.models.byte_classifier import TextClassifier

    return TextClassifier(len(LABELS))


def texts():
    """Pairs of a text and its label."""
{texts}


def recipe():
    import numpy as np
    from torch.nn.functional import cross_entropy

    from penstock import Optimizer
    from penstock.train.recipe import ArraySet, Data, Recipe, Selection, StepExecution, accuracy

    def examples(pairs):
        inputs = {{"text": [app.decode.of_text(text) for text, _ in pairs]}}
        return ArraySet(inputs=inputs, targets=np.array([LABELS.index(label) for _, label in pairs]))

    def data():
        # Every tenth for validation.
        pairs = sorted(set(texts()))
        order = np.random.default_rng(0).permutation(len(pairs))
        held = max(1, len(pairs) // 10)
        chosen = [[pairs[at] for at in part] for part in (order[held:], order[:held])]
        return Data(train=examples(chosen[0]), validation=examples(chosen[1]))

    return Recipe(
        data=data,
        loss=cross_entropy,
        optimizer=Optimizer("adamw", lr=1e-3, weight_decay=0.01),
        metrics={{"accuracy": accuracy}},
        selection=Selection(metric="accuracy", mode="max"),
        batch_size=32,
        epochs={epochs},
        clip_norm=1.0,
        execution=StepExecution(threads=1),
    )


app = Application(
    name="{name}",
    description="Classifies texts into {count} classes.",
    inputs={{
        "text": TensorSpec(
            dtype="uint8", shape=(Dim("bytes", max=MAX_BYTES),), meaning="bytes of a text in UTF-8", units="0..255"
        )
    }},
    output=TensorSpec(
        name="probabilities",
        dtype="float32",
        shape=(len(LABELS),),
        meaning="probability of each label",
        units="probability",
        labels=LABELS,
    ),
    decode=ByteText(tensor="text", max_bytes=MAX_BYTES, cut=True),
    accepts=("text/plain",),
    max_body_bytes=1 << 16,
    reply=lambda shares: {{"label": LABELS[shares.argmax()], "probability": round(float(shares.max()), 4)}},
    model=":network",
    recipe=":recipe",
)
'''

# Texts that the template makes itself, so that every command works before there are others.
MADE_LABELS = ("order", "question", "thanks")
MADE = """\
    # Made here, to be replaced by yours: [("a text", "its label"), ...].
    things = ("parcel", "invoice", "chair", "lamp", "ticket", "refund", "password", "garden table", "red bicycle")
    frames = {
        "order": ("please send me a {}", "I want to buy the {}", "one {} more, please", "I take two of the {}s"),
        "question": ("where is my {}?", "when does the {} come", "how much is a {}?", "do you have another {}"),
        "thanks": ("thank you for the {}", "the {} is great, thanks", "many thanks, the {} came", "thanks for my {}"),
    }
    return [(frame.format(thing), label) for label in LABELS for frame in frames[label] for thing in things]"""
READ = """\
    # One text a line: its label, a tab, the text.
    with open({data}, encoding="utf-8") as lines:
        rows = [line.rstrip("\\n").split("\\t", 1) for line in lines if line.strip()]
    return [(text, label) for label, text in rows]"""


def application_file(name: str, *, file: str, data: Path | None = None) -> str:
    """Fill in the template.

    Args:
        name: Name of the application.
        file: Name of the file.
        data: Labelled texts, one a line: a label, a tab, a text; None for a few that the file makes itself.

    Raises:
        ApplicationError: The data cannot be read, or have one label or few texts.
    """
    labels, texts, epochs = MADE_LABELS, MADE, 30
    if data is not None:
        labels, count = _labels(data)
        texts = READ.format(data=json.dumps(str(data.resolve()), ensure_ascii=False))
        epochs = max(3, round(20_000 / count))
    return FILE.format(
        name=name,
        file=file,
        labels="\n".join(f"    {json.dumps(label, ensure_ascii=False)}," for label in labels),
        texts=texts,
        epochs=epochs,
        count=len(labels),
    )


def _labels(data: Path) -> tuple[tuple[str, ...], int]:
    rows = read_tab_lines(data, "text", ("label", "text"), "a label, a tab, and a text")
    labels = tuple(sorted({label for label, _ in rows}))
    if len(labels) < MIN_TEXTS:
        raise ApplicationError(
            f"{data} has {len(labels)} label in {len(rows):,} texts; there must be two to tell apart."
        )
    return labels, len(rows)
