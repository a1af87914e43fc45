"""Layers that torch lacks: streaming layers, maxout, resizing, faster image layers; and a CTC loss."""

from penstock.nn.attention import StreamingAttention
from penstock.nn.convolution import CausalConv1d, CausalConv2d, Lookahead
from penstock.nn.ctc import ctc_loss
from penstock.nn.entry import EntryConv2d
from penstock.nn.maxout import Maxout
from penstock.nn.normalisation import SequenceBatchNorm
from penstock.nn.pooling import MaxPool2d
from penstock.nn.recurrent import GRU, LSTM
from penstock.nn.residual import Residual
from penstock.nn.resize import SquareResize
from penstock.nn.spectrogram import LogMel
from penstock.nn.split_frames import SplitFrames
from penstock.nn.streaming import FrameWise, Sequential, State, Step, Streaming, leaves, map_state

__all__ = [
    "GRU",
    "LSTM",
    "CausalConv1d",
    "CausalConv2d",
    "EntryConv2d",
    "FrameWise",
    "LogMel",
    "Lookahead",
    "MaxPool2d",
    "Maxout",
    "Residual",
    "SequenceBatchNorm",
    "Sequential",
    "SplitFrames",
    "SquareResize",
    "State",
    "Step",
    "Streaming",
    "StreamingAttention",
    "ctc_loss",
    "leaves",
    "map_state",
]
