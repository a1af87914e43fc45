"""Push of a bundle or a pack to a repository of the Hugging Face Hub, as one commit with a model card."""

import math
import re
from pathlib import Path
from typing import Any, final

from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import StorageError
from penstock.core.packs.pack import read_pack
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.remote.remote_copy import BUNDLE, PACK, FolderKind, files_of
from penstock.core.spec import Spec
from penstock.core.storage.remote_folder import RemoteFolder, url_of

CARD = "README.md"
# A card without this line is the user's own and is kept.
MARK = "<!-- Written by penstock push. Remove this line, and the next push keeps your text. -->"
_ADDRESS = re.compile(r"hf://(?P<repository>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<path>.+))?")
_KINDS = ("datasets", "spaces", "buckets", "models")


def push_to_hub(kind: FolderKind, folder: Path, url: str, *, private: bool = False) -> str:
    """Push a bundle or a pack to a repository, which is made if it is not there.

    Args:
        kind: Which of the two.
        folder: Its folder.
        url: `hf://user/name`, with `@branch` or a folder in the repository, if wanted.
        private: Make a new repository private.

    Returns:
        The commit.

    Raises:
        BundleError: It is no bundle, or damaged.
        PackError: It is no pack, or damaged.
        StorageError: The repository cannot be written, or holds something else.
    """
    address = _ADDRESS.fullmatch(url)
    if address is None or address["repository"].partition("/")[0] in _KINDS:
        raise StorageError(f"{url} names no repository of models; give hf://user/name or hf://user/name@BRANCH.")
    names = files_of(kind, folder)
    for name in names:
        _refuse_pickle(folder / name)
    card = model_card(kind, folder, url)
    # Also gives the sentence on a missing package.
    remote = RemoteFolder(url)
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api, below = HfApi(), f"{address['path']}/" if address["path"] else ""
    with remote.translated("written"):
        api.create_repo(address["repository"], private=private or None, exist_ok=True)
        held = remote.sizes()
        other = PACK if kind is BUNDLE else BUNDLE
        if other.description in held:
            raise StorageError(f"{url} holds a {other.name}; push the {kind.name} to another repository.")
        operations = [CommitOperationAdd(f"{below}{name}", str(folder / name)) for name in names]
        if MARK in (remote.read(CARD) or MARK.encode()).decode(errors="replace"):
            operations.append(CommitOperationAdd(f"{below}{CARD}", card.encode()))
        commit: Any = api.create_commit(
            address["repository"],
            operations,
            commit_message=f"penstock push: {kind.name}",
            revision=address["revision"],
        )
    return str(commit.oid)


def model_card(kind: FolderKind, folder: Path, url: str) -> str:
    """Write the model card of a bundle or a pack: what it is, its inputs and outputs, its metrics, how to use it.

    Args:
        kind: Which of the two.
        folder: Its folder.
        url: Where it will be.
    """
    facts = _of_bundle(folder) if kind is BUNDLE else _of_pack(folder)
    address = str(url_of(url))
    return "\n".join(
        [
            "---",
            "library_name: penstock",
            "tags:",
            "- penstock",
            f"- {kind.name}",
            "---",
            MARK,
            "",
            f"# {facts.name}",
            "",
            *facts.about,
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.rows),
            "",
            "## Use",
            "",
            "```text",
            "$ pip install 'penstock-nn[cpu,remote]'"
            if kind is BUNDLE
            else "$ pip install 'penstock-nn[device,remote]'",
            f"$ penstock {'serve' if kind is BUNDLE else 'watch'} {address}",
            "```",
            "",
            *facts.notes,
            "Every file is verified by its SHA-256 when it is read. There are no pickles.",
            "",
        ]
    )


@final
class _Facts:
    """Content of a card."""

    def __init__(self, name: str, about: list[str], rows: list[tuple[str, str]], notes: list[str]) -> None:
        self.name, self.about, self.rows, self.notes = name, about, rows, notes


def _of_bundle(folder: Path) -> _Facts:
    manifest = read_bundle(folder).manifest
    rows = [
        *_tensors("input", manifest.input),
        *_tensors("output", manifest.output),
        ("parameters", f"{manifest.parameters:,}"),
        *_metrics(manifest.metrics),
        ("content hash", manifest.content_hash),
        ("written with", ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))),
    ]
    notes = [
        f"The application is `{manifest.reference or 'an object of a notebook'}`: its sources are not in the bundle. "
        f"Where it is elsewhere, add `--app REF`. In Python: `penstock.load(URL)`.",
        "",
    ]
    return _Facts(manifest.name, ["A bundle of [Penstock](https://pypi.org/project/penstock-nn/)."], rows, notes)


def _of_pack(folder: Path) -> _Facts:
    pack = read_pack(folder)
    inputs = [("input", pack.raw.describe())] if pack.raw is not None else _tensors("input", pack.input)
    rows = [
        *inputs,
        *_tensors("output", pack.output),
        *(
            (f"accuracy, {precision}", f"{model.accuracy:.4f}")
            for precision, model in pack.models.items()
            if model.accuracy is not None
        ),
        *([("licence", pack.licence)] if pack.licence else []),
        ("made of", ", ".join(f"{name} {value}" for name, value in sorted(pack.made.items()))),
    ]
    about = [pack.description or "A network.", "", "A pack of Penstock, for devices and browsers; it needs no torch."]
    return _Facts(pack.name, about, rows, [])


def _metrics(metrics: dict[str, float]) -> list[tuple[str, str]]:
    return [(name, f"{value:.4f}") for name, value in sorted(metrics.items()) if math.isfinite(value)]


def _tensors(side: str, spec: "ChunkSpec | Any") -> list[tuple[str, str]]:
    tensors = spec.tensors if isinstance(spec, RecordSpec) else (spec,)
    return [
        (f"{side} `{each.name}`" if isinstance(each, Spec) and hasattr(each, "name") else side, _described(each))
        for each in tensors
    ]


def _described(spec: Any) -> str:
    return ", ".join(part for part in (spec.describe(), spec.meaning, spec.units) if part)


def _cell(text: str) -> str:
    # What an application declares must not break the table, or be HTML.
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _refuse_pickle(file: Path) -> None:
    with file.open("rb") as source:
        head = source.read(9)
    # torch.save writes a zip or a bare pickle; a safetensors file is a length in 8 bytes and then JSON.
    if head.startswith((b"PK\x03\x04", b"\x80")) and head[8:] != b"{":
        raise StorageError(f"{file} is a pickle or a zip, which can run any code when it is loaded; it is not pushed.")
