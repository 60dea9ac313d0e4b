"""The paradigms that a configuration can name."""

from .autoregressive import AutoregressiveConfig
from .config import choice_of

PARADIGMS = {
    "autoregressive": AutoregressiveConfig,
}

ParadigmConfig = choice_of(PARADIGMS)
