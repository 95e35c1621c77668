"""Hooks that send fewer bytes, and keep what they have not sent for the next step."""

from gradwire.hooks.compression.blocks import BlockQuantization
from gradwire.hooks.compression.compressor import Compressor, Reduction
from gradwire.hooks.compression.low_rank import LowRank
from gradwire.hooks.compression.memory import ParameterMemory
from gradwire.hooks.compression.sign import Sign
from gradwire.hooks.compression.state import CompressorState
from gradwire.hooks.compression.top_k import TopK
from gradwire.hooks.compression.two_phase import TwoPhase
from gradwire.hooks.compression.wire import Traffic, Wire

__all__ = [
    "BlockQuantization",
    "Compressor",
    "CompressorState",
    "LowRank",
    "ParameterMemory",
    "Reduction",
    "Sign",
    "TopK",
    "Traffic",
    "TwoPhase",
    "Wire",
]
