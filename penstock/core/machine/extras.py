"""Extras of the distribution: which one installs a package that is missing, in one sentence."""

from collections.abc import Mapping

DISTRIBUTION = "penstock-nn"
# Import names of the packages of each extra, without those that an extra takes over from another one.
PACKAGES: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(
        {
            "httptools",
            "multipart",
            "onnx",
            "onnxruntime",
            "onnxscript",
            "orjson",
            "PIL",
            "prometheus_client",
            "rich",
            "safetensors",
            "simplejpeg",
            "soxr",
            "torch",
            "typer",
            "uvloop",
            "websockets",
        }
    ),
    "client": frozenset({"httpx2", "orjson", "websockets"}),
    "device": frozenset(
        {"av", "cryptography", "onnxruntime", "PIL", "rich", "safetensors", "simplejpeg", "soxr", "typer"}
    ),
    "train": frozenset({"matplotlib", "tensorboard"}),
    "apps": frozenset({"django", "skimage", "sklearn", "soundfile"}),
    "data": frozenset({"datasets", "soundfile"}),
    "grpc": frozenset({"google", "grpc"}),
    "remote": frozenset({"fsspec", "huggingface_hub", "s3fs"}),
    "score": frozenset({"fsspec", "pyarrow"}),
    "sweep": frozenset({"optuna"}),
    "slides": frozenset({"openslide"}),
    "spark": frozenset({"pyspark"}),
    "ray": frozenset({"ray"}),
    "telemetry": frozenset({"opentelemetry"}),
    "tickets": frozenset({"cryptography"}),
}
# Extras of commands and public names that do not need `cpu`.
_EXTRA_FOR = {
    "AsyncClient": "client",
    "Client": "client",
    "DatasetExamples": "data",
    "index": "device",
    "score": "score",
    "scorer": "score",
    "search": "device",
    "tiles": "device",
    "watch": "device",
}


def missing_package(what: str, module: str | None, user: str) -> str | None:
    """Return the sentence on a package that is not installed; None for a module of no extra.

    Args:
        what: What needs it, as the sentence names it.
        module: The module that was not found.
        user: The command or public name by which the extra is chosen where several have the package.
    """
    package = (module or "").partition(".")[0]
    likely = _EXTRA_FOR.get(user, "cpu")
    extra = next((name for name in (likely, *PACKAGES) if package in PACKAGES[name]), None)
    if extra is None:
        return None
    return f"{what} needs the package {package}, which is not installed; pip install '{DISTRIBUTION}[{extra}]'."
