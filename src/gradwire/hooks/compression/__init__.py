"""Compressing hooks, which add the part of a gradient that they did not send to the next one."""

from gradwire.hooks.compression.compressor import Compressor, Reduction
from gradwire.hooks.compression.low_rank import LowRank
from gradwire.hooks.compression.state import CompressorState, ParameterMemory
from gradwire.hooks.compression.top_k import TopK
from gradwire.hooks.compression.two_phase import BlockQuantization, Sign, TwoPhase
from gradwire.hooks.compression.wire import Collective, Message, Traffic, Wire

__all__ = [
    "BlockQuantization",
    "Collective",
    "Compressor",
    "CompressorState",
    "LowRank",
    "Message",
    "ParameterMemory",
    "Reduction",
    "Sign",
    "TopK",
    "Traffic",
    "TwoPhase",
    "Wire",
]
