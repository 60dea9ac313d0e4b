"""The architectures that can be read and written. Adding one is a file and a line here."""

from ...errors import ConfigError, suggest
from .architecture import Architecture
from .architectures import (
    albert,
    bert,
    dream,
    falcon,
    jamba,
    llada,
    llama,
    mamba,
    mixtral,
    neox,
    zamba,
)
from .hf_config import HFConfig

ARCHITECTURES: tuple[Architecture, ...] = (
    llama.ARCHITECTURE,
    neox.ARCHITECTURE,
    mixtral.ARCHITECTURE,
    mamba.ARCHITECTURE,
    jamba.ARCHITECTURE,
    zamba.ARCHITECTURE,
    falcon.ARCHITECTURE,
    bert.ARCHITECTURE,
    albert.ARCHITECTURE,
    llada.ARCHITECTURE,
    dream.ARCHITECTURE,
)
BY_MODEL_TYPE = {kind: one for one in ARCHITECTURES for kind in one.model_types}


def architecture_of(config: HFConfig) -> Architecture:
    """The architecture of a published config.

    Raises:
        ConfigError: it says none, or one that is not implemented.
    """
    kind = config.take("model_type", str)
    if kind not in BY_MODEL_TYPE:
        raise ConfigError(
            f"{config.source}: model_type is {kind!r}, which genlab does not implement"
            f"{suggest(kind, BY_MODEL_TYPE)}"
        )
    return BY_MODEL_TYPE[kind]
