"""What a configuration can name. Adding a mixer, a block or an MLP is one line here."""

from .blocks.prenorm import PreNormConfig
from .config import choice_of
from .mixers.attention import AttentionConfig
from .mixers.mamba import MambaConfig
from .mixers.mamba2 import Mamba2Config
from .mixers.symmetric_conv import SymmetricConvConfig
from .mlps.swiglu import SwiGLUConfig

MIXERS = {
    "attention": AttentionConfig,
    "mamba": MambaConfig,
    "mamba2": Mamba2Config,
    "symmetric_conv": SymmetricConvConfig,
}

BLOCKS = {
    "prenorm": PreNormConfig,
}

MLPS = {
    "swiglu": SwiGLUConfig,
}

MixerConfig = choice_of(MIXERS)
BlockConfig = choice_of(BLOCKS)
MlpConfig = choice_of(MLPS)
