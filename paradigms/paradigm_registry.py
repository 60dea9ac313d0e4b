"""The paradigms that a configuration can name."""

from .autoregressive import AutoregressiveConfig
from .config import choice_of
from .masked_diffusion import MaskedDiffusionConfig

PARADIGMS = {
    "autoregressive": AutoregressiveConfig,
    "masked_diffusion": MaskedDiffusionConfig,
}

ParadigmConfig = choice_of(PARADIGMS)
