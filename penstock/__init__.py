"""Penstock: declare a network once; train it, serve it, carry it, with the same answer in each place.

The public names are imported when they are first used, so that `import penstock` alone loads neither torch nor NumPy.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.core.machine.extras import missing_package
from penstock.core.machine.same_name import warn_of_same_name
from penstock.core.machine.version import __version__ as __version__

if TYPE_CHECKING:
    from penstock.client.client import AsyncClient as AsyncClient
    from penstock.client.client import Client as Client
    from penstock.client.lasting_stream import Reconnect as Reconnect
    from penstock.core.application import Application as Application
    from penstock.core.chains.chain import Chain as Chain
    from penstock.core.chains.chain import ChainStep as ChainStep
    from penstock.core.dim import Dim as Dim
    from penstock.core.errors import PenstockError as PenstockError
    from penstock.core.finish import Finish as Finish
    from penstock.core.generate import Generate as Generate
    from penstock.core.initial import Initial as Initial
    from penstock.core.picture_file import PictureFile as PictureFile
    from penstock.core.pictures.boxes import Boxes as Boxes
    from penstock.core.pictures.dense import Dense as Dense
    from penstock.core.prepare import Prepare as Prepare
    from penstock.core.prepare import RawSpec as RawSpec
    from penstock.core.recognition import Recognition as Recognition
    from penstock.core.spec import TensorSpec as TensorSpec
    from penstock.core.speech.arpa import read_arpa as read_arpa
    from penstock.core.speech.endpoint_beam import EndpointBeam as EndpointBeam
    from penstock.core.speech.endpoint_beam import Redecoded as Redecoded
    from penstock.core.speech.hot_words import HotWord as HotWord
    from penstock.core.speech.ngram import NGram as NGram
    from penstock.core.speech.ngram_training import train_ngram as train_ngram
    from penstock.core.speech.spoken import Speech as Speech
    from penstock.core.speech.spoken import Word as Word
    from penstock.core.streams.live import Live as Live
    from penstock.core.streams.segments import Segments as Segments
    from penstock.core.texts.subword_text import SubwordReply as SubwordReply
    from penstock.core.texts.subword_text import SubwordText as SubwordText
    from penstock.core.texts.text import ByteText as ByteText
    from penstock.runtime.bundle_writer import Bundle as Bundle
    from penstock.runtime.load import Predictor as Predictor
    from penstock.runtime.load import load as load
    from penstock.runtime.load_chain import load_chain as load_chain
    from penstock.score.scorer import scorer as scorer
    from penstock.train.callbacks.callback import Callback as Callback
    from penstock.train.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from penstock.train.fit import Fitted as Fitted
    from penstock.train.fit import fit as fit
    from penstock.train.recipe import Recipe as Recipe
    from penstock.train.step.declared_optimizer import Optimizer as Optimizer
    from penstock.train.step.declared_schedule import Schedule as Schedule


_HOME = {
    "Application": "penstock.core.application",
    "AsyncClient": "penstock.client.client",
    "Boxes": "penstock.core.pictures.boxes",
    "Bundle": "penstock.runtime.bundle_writer",
    "ByteText": "penstock.core.texts.text",
    "Callback": "penstock.train.callbacks.callback",
    "Chain": "penstock.core.chains.chain",
    "ChainStep": "penstock.core.chains.chain",
    "Client": "penstock.client.client",
    "Dense": "penstock.core.pictures.dense",
    "Dim": "penstock.core.dim",
    "EarlyStopping": "penstock.train.callbacks.early_stopping",
    "EndpointBeam": "penstock.core.speech.endpoint_beam",
    "Finish": "penstock.core.finish",
    "Fitted": "penstock.train.fit",
    "Generate": "penstock.core.generate",
    "HotWord": "penstock.core.speech.hot_words",
    "Initial": "penstock.core.initial",
    "Live": "penstock.core.streams.live",
    "NGram": "penstock.core.speech.ngram",
    "Optimizer": "penstock.train.step.declared_optimizer",
    "PenstockError": "penstock.core.errors",
    "PictureFile": "penstock.core.picture_file",
    "Predictor": "penstock.runtime.load",
    "Prepare": "penstock.core.prepare",
    "RawSpec": "penstock.core.prepare",
    "Recipe": "penstock.train.recipe",
    "Recognition": "penstock.core.recognition",
    "Reconnect": "penstock.client.lasting_stream",
    "Redecoded": "penstock.core.speech.endpoint_beam",
    "Schedule": "penstock.train.step.declared_schedule",
    "Segments": "penstock.core.streams.segments",
    "Speech": "penstock.core.speech.spoken",
    "SubwordReply": "penstock.core.texts.subword_text",
    "SubwordText": "penstock.core.texts.subword_text",
    "TensorSpec": "penstock.core.spec",
    "Word": "penstock.core.speech.spoken",
    "fit": "penstock.train.fit",
    "load": "penstock.runtime.load",
    "load_chain": "penstock.runtime.load_chain",
    "read_arpa": "penstock.core.speech.arpa",
    "scorer": "penstock.score.scorer",
    "train_ngram": "penstock.core.speech.ngram_training",
}

__all__ = [
    "Application",
    "AsyncClient",
    "Boxes",
    "Bundle",
    "ByteText",
    "Callback",
    "Chain",
    "ChainStep",
    "Client",
    "Dense",
    "Dim",
    "EarlyStopping",
    "EndpointBeam",
    "Finish",
    "Fitted",
    "Generate",
    "HotWord",
    "Initial",
    "Live",
    "NGram",
    "Optimizer",
    "PenstockError",
    "PictureFile",
    "Predictor",
    "Prepare",
    "RawSpec",
    "Recipe",
    "Recognition",
    "Reconnect",
    "Redecoded",
    "Schedule",
    "Segments",
    "Speech",
    "SubwordReply",
    "SubwordText",
    "TensorSpec",
    "Word",
    "fit",
    "load",
    "load_chain",
    "read_arpa",
    "scorer",
    "train_ngram",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        sentence = missing_package(f"penstock.{name}", error.name, name)
        if sentence is None:
            raise
        raise ModuleNotFoundError(sentence, name=error.name) from None


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


warn_of_same_name(sys.path)
