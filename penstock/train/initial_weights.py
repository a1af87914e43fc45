"""Loading of the weights that a training starts from: files, folders of Hugging Face, names of timm and torchvision."""

import hashlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.core.initial import LIBRARIES, Initial, StartedFrom
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.wording.counted import counted
from penstock.train.parallel.world import World
from penstock.train.report.run_log import RUN_FILE

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of names, and of patterns, in one sentence.
_NAMED, _PATTERNS = 3, 8


def started_from(
    found: FoundApplication, network: nn.Module, folder: Path, world: World, *, resumed: bool
) -> StartedFrom | None:
    """Load the application's initial weights into a network; a resumed run only reads what it recorded.

    Args:
        found: The application.
        network: Its network, whole, on the CPU.
        folder: RUN.
        world: The processes that train together; they must find the same weights.
        resumed: Whether the weights come from a checkpoint.

    Raises:
        TrainError: The weights cannot be read, do not fit, or differ between the processes.
    """
    initial = found.application.initial
    if resumed:
        return recorded(folder)
    if initial is None:
        return None
    file = getattr(found.module, "__file__", None)
    return load_initial(as_initial(initial), network, Path.cwd() if file is None else Path(file).parent, world)


def as_initial(initial: "str | Path | Initial") -> Initial:
    """Complete the short form, the source alone."""
    return initial if isinstance(initial, Initial) else Initial(str(initial))


def recorded(folder: Path) -> StartedFrom | None:
    """The weights that the run in a folder started from, by its run.json."""
    try:
        fields = json.loads((folder / RUN_FILE).read_bytes()).get("initial")
        return None if fields is None else StartedFrom(**fields)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def load_initial(initial: Initial, network: nn.Module, beside: Path, world: World | None = None) -> StartedFrom:
    """Load weights into a network by its names.

    Args:
        initial: The source, and how its names fit.
        network: The network, whole.
        beside: The folder that relative paths start in.
        world: The processes that train together.

    Raises:
        TrainError: The source cannot be read, a name or shape does not fit, or the processes find different weights.
    """
    # In the words of one process, so that a mistake ends all of them.
    problem, sha256 = "", ""
    try:
        given, sha256 = read_initial(initial.source, beside)
        _load(initial, network, given)
    except TrainError as error:
        problem = str(error)
    for other, (sentence, digest) in enumerate((world or World()).all_gather_objects((problem, sha256))):
        if sentence:
            raise TrainError(sentence)
        if not problem and digest != sha256:
            raise TrainError(
                f"the initial weights {initial.source!r} are not the same in process {other} as in another; copy one "
                f"of them to all machines."
            )
    return StartedFrom(source=initial.source, sha256=sha256)


def read_initial(source: str, beside: Path) -> tuple[dict[str, Tensor], str]:
    """Read the tensors of a source, and their SHA-256.

    The hash is that of the file; of several files, that of lines with the hash and the name of each; of a library's
    weights, that of their names, types, shapes and bytes in the order of their names.

    Args:
        source: See `Initial`.
        beside: The folder that relative paths start in.

    Raises:
        TrainError: There is nothing, or it cannot be read.
    """
    try:
        return _read(source, beside)
    # RuntimeError: a user's home folder that there is not.
    except (OSError, RuntimeError) as error:
        raise TrainError(
            f"the initial weights {source!r} cannot be read ({_cause(error)}); give a path that this user may read."
        ) from error


def _read(source: str, beside: Path) -> tuple[dict[str, Tensor], str]:
    library, colon, name = source.partition(":")
    if colon and library in LIBRARIES:
        tensors = _of_timm(name) if library == "timm" else _of_torchvision(name)
        return tensors, _digest_of(tensors)
    path = beside / Path(source).expanduser()
    if not path.exists():
        raise TrainError(
            f"there are no initial weights at {path}; give a safetensors file, a folder of Hugging Face, 'timm:NAME' "
            f"or 'torchvision:NAME'."
        )
    files = _files_of(path) if path.is_dir() else [path]
    digests = [_digest(file) for file in files]
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = _tensors(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise TrainError(
                f"{file} has the tensor {twice[0]!r}, which another file of {INDEX} has too; save the folder again."
            )
        tensors |= found
    lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
    return tensors, digests[0] if len(files) == 1 else hashlib.sha256(lines.encode()).hexdigest()


def _files_of(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise TrainError(
            f"{folder} has no {WEIGHTS} and no {INDEX}; save it with network.save_pretrained({str(folder)!r})."
        )
    try:
        names = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        # A name, not a path out of the folder.
        files = [folder / Path(name).name for name in sorted(set(names))]
    except (ValueError, KeyError, AttributeError, TypeError):
        files = []
    if not files:
        raise TrainError(f"{folder / INDEX} lists no files by name; download the folder again.")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise TrainError(f"{folder} lacks {missing[0]}, which {INDEX} lists; download the folder again.")
    return files


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        with file.open("rb") as source:
            pickled = source.read(4).startswith((b"PK\x03\x04", b"\x80"))
        if pickled:
            raise TrainError(
                f"{file} is a pickle, which can run any code when it is loaded; if you trust it, load it yourself and "
                f"write its state_dict with safetensors.torch.save_file."
            ) from None
        raise TrainError(f"{file} is not a readable safetensors file ({error}); write it again.") from None


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _of_timm(name: str) -> dict[str, Tensor]:
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TrainError(
            f"the initial weights 'timm:{name}' need the package timm ({error}); install it where you train."
        ) from None
    create: Any = timm.create_model  # pyright: ignore
    if name.partition(".")[0] not in timm.list_models():  # pyright: ignore
        raise TrainError(f"timm has no network {name!r}{_closest(name, timm.list_models())}.")  # pyright: ignore
    try:
        with torch.random.fork_rng(devices=[]):
            return dict(create(name, pretrained=True).state_dict())
    except Exception as error:
        # Whatever its download raises.
        raise TrainError(
            f"timm gives no weights of {name!r} ({_cause(error)}); try timm.create_model alone."
        ) from error


def _of_torchvision(name: str) -> dict[str, Tensor]:
    try:
        from torchvision import models  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TrainError(
            f"the initial weights 'torchvision:{name}' need the package torchvision ({error}); install it where you "
            f"train."
        ) from None
    library: Any = models  # pyright: ignore
    networks = library.list_models()
    enum, dot, _ = name.partition(".")
    if not dot and name not in networks:
        raise TrainError(f"torchvision has no network {name!r}{_closest(name, networks)}.")
    try:
        weights = library.get_weight(name) if dot else library.get_model_weights(name).DEFAULT
        return dict(weights.get_state_dict(progress=False, check_hash=True))
    except Exception as error:
        raise TrainError(
            f"torchvision gives no weights of {name!r} ({_cause(error)}); names are those of a network, or of its "
            f"weights, such as {enum if dot else 'ResNet50_Weights'}.DEFAULT."
        ) from error


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(".")


def _closest(name: str, names: list[str]) -> str:
    found = get_close_matches(name, names, 1, 0.5)
    return f"; the closest name is {found[0]!r}" if found else ""


def _load(initial: Initial, network: nn.Module, source: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a source into a network's, all or none."""

    def skipped(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in initial.skip)

    own: dict[str, Tensor] = network.state_dict(keep_vars=True)
    for old in initial.rename:
        if not any(name.startswith(old) for name in source):
            raise TrainError(
                f"no tensor of {initial.source!r} has a name that begins with {old!r}, which rename has; names there "
                f"are {_with_closest(list(source), [])}."
            )
    unused = [pattern for pattern in initial.skip if not any(fnmatchcase(name, pattern) for name in own)]
    given = {initial.renamed(name): tensor for name, tensor in source.items()}
    if len(given) != len(source):
        raise TrainError(f"{initial.source!r} has two tensors of one name after rename={dict(initial.rename)}.")
    unused = [pattern for pattern in unused if not any(fnmatchcase(name, pattern) for name in given)]
    if unused:
        raise TrainError(f"no tensor has a name like skip={unused[0]!r}{_closest(unused[0].rstrip('.*'), list(own))}.")
    given = {name: tensor for name, tensor in given.items() if not skipped(name)}
    if not given:
        raise TrainError(
            f"no tensor of {initial.source!r} would be loaded with skip={initial.skip}; skip fewer, or leave out "
            f"initial."
        )
    # A tied weight is stored once.
    present = {id(own[name]) for name in given if name in own}
    missing = [
        name for name, tensor in own.items() if name not in given and not skipped(name) and id(tensor) not in present
    ]
    unknown = [name for name in given if name not in own]
    wrong = [name for name, tensor in given.items() if name in own and not _fits(tensor, own[name])]
    if missing or unknown or wrong:
        raise TrainError(_differences(initial, own, given, missing, unknown, wrong))
    for name, tensor in given.items():
        _check_finite(initial, name, tensor, own[name])
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _check_finite(initial: Initial, name: str, theirs: Tensor, ours: Tensor) -> None:
    cast = theirs.to(ours.dtype)
    # A mask may hold infinity, in the network as well.
    if cast.isfinite().all() or not (~cast.isfinite() & (cast != ours.detach())).any():
        return
    if theirs.isfinite().all():
        raise TrainError(
            f"the tensor {name!r} of {initial.source!r} has numbers that {_dtype(ours)} cannot hold; its type is "
            f"{_dtype(theirs)}: scale it, or leave it out with skip=({name!r},)."
        )
    raise TrainError(
        f"the tensor {name!r} of {initial.source!r} has NaN or infinity; take the weights of an earlier checkpoint, or "
        f"leave it out with skip=({name!r},)."
    )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _fits(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.shape == ours.shape and theirs.is_floating_point() == ours.is_floating_point()


def _differences(
    initial: Initial,
    own: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    missing: list[str],
    unknown: list[str],
    wrong: list[str],
) -> str:
    said: list[str] = []
    if missing:
        said.append(f"{counted(len(missing), 'tensor is', 'tensors are')} missing: {_with_closest(missing, unknown)}")
    if unknown:
        said.append(f"{counted(len(unknown), 'is', 'are')} not in the network: {_with_closest(unknown, missing)}")
    if wrong:
        first = wrong[0]
        theirs, ours = (f"{_dtype(each[first])}{list(each[first].shape)}" for each in (given, own))
        others = counted(len(wrong), "is", "are")
        said.append(f"{others} of another shape or type: {first!r} is {theirs}, and {ours} in the network")
    if missing and unknown:
        fix = "give rename={beginning: replacement} for names, or skip=(...) for what shall start at random"
    else:
        fix = f"leave them out with skip={_patterns([*wrong, *missing, *unknown])}"
    return f"the initial weights {initial.source!r} do not fit the network: {'; '.join(said)}. To use them, {fix}."


def _patterns(names: list[str]) -> str:
    """Patterns of the modules that names are in; of whole branches of the network if there are many modules."""
    found = list(dict.fromkeys(f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names))
    if len(found) > _PATTERNS:
        found = list(dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in names))
    more = ", ..." if len(found) > _PATTERNS else "," if len(found) == 1 else ""
    return f"({', '.join(map(repr, found[:_PATTERNS]))}{more})"


def _with_closest(names: list[str], others: list[str]) -> str:
    shown: list[str] = []
    for name in names[:_NAMED]:
        found = get_close_matches(name, others, 1, 0.5)
        shown.append(f"{name!r} (there is {found[0]!r})" if found else repr(name))
    return ", ".join(shown) + (", ..." if len(names) > _NAMED else "")
