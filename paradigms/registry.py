"""What a configuration can name. Adding a mixer, a block or an MLP is one line here."""

from .blocks.parallel import ParallelConfig
from .blocks.parallel_heads import ParallelHeadsConfig
from .blocks.postnorm import PostNormConfig
from .blocks.prenorm import PreNormConfig
from .blocks.shared import SharedConfig
from .config import choice_of
from .mixers.attention import AttentionConfig
from .mixers.mamba import MambaConfig
from .mixers.mamba2 import Mamba2Config
from .mixers.symmetric_conv import SymmetricConvConfig
from .mlps.moe import MoEConfig
from .mlps.plain import PlainConfig
from .mlps.swiglu import SwiGLUConfig

MIXERS = {
    "attention": AttentionConfig,
    "mamba": MambaConfig,
    "mamba2": Mamba2Config,
    "symmetric_conv": SymmetricConvConfig,
}

BLOCKS = {
    "prenorm": PreNormConfig,
    "postnorm": PostNormConfig,
    "parallel": ParallelConfig,
    "parallel_heads": ParallelHeadsConfig,
    "shared": SharedConfig,
}

MLPS = {
    "swiglu": SwiGLUConfig,
    "moe": MoEConfig,
    "plain": PlainConfig,
}

MixerConfig = choice_of(MIXERS)
BlockConfig = choice_of(BLOCKS)
MlpConfig = choice_of(MLPS)
