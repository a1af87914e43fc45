"""Served models whose application declares `speech`, as clients of speech services find them."""

from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_chain import Served
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.transcription.speech_model import SpeechModel
from penstock.serve.transcription.vendor_errors import UnknownModel


def speech_models(models: ModelRegistry) -> list[ServedModel]:
    """The newest version of each."""
    return [served for served in models.newest if isinstance(served, ServedModel) and has_speech(served)]


def has_speech(served: Served) -> bool:
    """True if the events of a model say what is spoken."""
    live = served.application.live
    return isinstance(served, ServedModel) and live is not None and live.speech is not None


def with_speech(models: ModelRegistry, name: str) -> ServedModel:
    """Find a model by the name that a client of a speech service gives, or the only one if it gives none.

    Raises:
        UnknownModel: There is none, or it has no words, or the name is missing and there are several.
        Overloaded: It is being loaded, or the server is not ready and has no such model yet.
    """
    there = speech_models(models)
    if not name and len(there) == 1:
        return there[0]
    listed = ", ".join(repr(served.name) for served in there)
    if not name and there:
        raise UnknownModel(f"The request names no model; send as model one of those that recognise words: {listed}.")
    if name not in (served.name for served in there):
        # It may be loaded on first use, which is begun here.
        served = models.named(name) if name and _is_known(models, name) else None
        if isinstance(served, ServedModel) and has_speech(served):
            return served
        if there:
            raise UnknownModel(f"There is no model {name[:80]!r} that recognises words; there is {listed}.")
        if models.incomplete:
            models.reject_unready()
            raise UnknownModel("No model that is loaded recognises words; send as model the name of one to load.")
        raise UnknownModel("No model here recognises words; serve an application whose Live declares speech.")
    return next(served for served in there if served.name == name)


def _is_known(models: ModelRegistry, name: str) -> bool:
    return models.starting or any(known == name for known, _ in models.states) or models.has_model(name)


def speech_model(served: ServedModel) -> SpeechModel:
    """Describe a model to a client of a speech service."""
    return SpeechModel(
        name=served.name,
        version=served.version,
        content_hash=served.content_hash,
        application=served.application,
    )
