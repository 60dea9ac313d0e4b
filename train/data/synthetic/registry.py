"""The synthetic tasks by name."""

from ....paradigms.config import choice_of
from .constraint_drift import ConstraintDriftConfig
from .copying import CopyingConfig, SelectiveCopyingConfig
from .reasoning import ChainArithmeticConfig, ParityConfig
from .recall import InductionConfig, MQARConfig, NeedleConfig
from .star_graph import StarGraphConfig

TASKS = {
    "mqar": MQARConfig,
    "induction": InductionConfig,
    "needle": NeedleConfig,
    "copying": CopyingConfig,
    "selective_copying": SelectiveCopyingConfig,
    "chain_arithmetic": ChainArithmeticConfig,
    "parity": ParityConfig,
    "star_graph": StarGraphConfig,
    "constraint_drift": ConstraintDriftConfig,
}

SyntheticTaskConfig = choice_of(TASKS)
