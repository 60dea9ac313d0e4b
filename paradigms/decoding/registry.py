"""The decodings that a configuration can name. Adding one is a line in each table here."""

from ...errors import ConfigError, suggest
from ..config import Config, choice_of
from .plain import PlainConfig
from .unmasking import UnmaskingConfig

DECODINGS = {
    "plain": PlainConfig,
    "unmasking": UnmaskingConfig,
}

# How a paradigm's models are run when nothing else is asked for.
DEFAULTS = {
    "autoregressive": "plain",
    "masked_diffusion": "unmasking",
}

DecodingConfig = choice_of(DECODINGS)


def default_decoding(paradigm: str) -> Config:
    """The plain form of decoding for a paradigm, with its default settings.

    Raises:
        ConfigError: no such paradigm.
    """
    if paradigm not in DEFAULTS:
        raise ConfigError(f"no decoding for paradigm {paradigm!r}{suggest(paradigm, DEFAULTS)}")
    return DECODINGS[DEFAULTS[paradigm]]()
