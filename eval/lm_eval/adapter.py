"""The model `genlab` of lm-evaluation-harness."""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...errors import ConfigError, suggest
from ...paradigms.interface import SpecialIds
from ...train.device import describe_device, enable_compile_cache
from ...train.interop.chat import TEMPLATE, ChatTemplate, chat_template_of
from ...train.interop.tokenizer_files import SETTINGS
from ...train.run_folder import SOURCE
from ..loaded import load
from .encoding import encode, encode_pair
from .generation import Wanted, Writer, read_gen_kwargs
from .scoring import Pair, Scored, Scorer

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm
except ModuleNotFoundError:  # without the extra this module can be imported, but not used
    LM = object

NAME = "genlab"
ARGUMENTS = (
    "path", "dtype", "batch_size", "max_batch_size", "device", "max_length", "draws", "steps",
    "seed",
)  # fmt: skip
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}
DEFAULT_DEVICE = "cuda:0"  # what the harness hands on when no device was asked for
logger = logging.getLogger(__name__)


class GenlabLM(LM):
    """A run of genlab, or a published checkpoint that genlab reads, of any paradigm.

    Autoregressive, state-space and hybrid models are scored exactly; diffusion by a bound whose
    draws and standard error stand in the results (`config` of the results file).
    """

    def __init__(self, **arguments: Any) -> None:
        """Loads the model.

        Args:
            **arguments: what `--model_args` takes.
                path: a run folder, or a checkpoint's folder.
                dtype: float32 or bfloat16; the run's own when left out.
                batch_size: rows of a call, 1 when left out, or "auto" (see `Scorer`).
                max_batch_size: of "auto".
                device: cpu, gpu (or cuda) or tpu: refuse any other; what JAX found when left out.
                max_length: less context than the model can take.
                draws: diffusion: noise levels for a bound; the run's own when left out.
                steps: diffusion: model calls for an answer; one for each token when left out.
                seed: of draws and sampling; 0 when left out.

        Raises:
            GenlabError: an argument is unknown or wrong, or the run cannot be loaded.
        """
        super().__init__()
        for name in arguments:
            if name not in ARGUMENTS:
                raise ConfigError(f"model_args: no argument {name!r}{suggest(name, ARGUMENTS)}")
        values = {name: value for name, value in arguments.items() if value is not None}
        if "path" not in values:
            raise ConfigError("model_args: path is missing: give --model_args path=RUN")
        _require_device(values.get("device"))
        enable_compile_cache()
        self.path = Path(str(values["path"]))
        self._dtype = values.get("dtype")
        loaded = load(self.path, dtype=self._dtype)
        self._model, self.tokens, paradigm = loaded
        steps = values.get("steps", 0)
        if steps and paradigm.name == "autoregressive":
            raise ConfigError(f"steps {steps!r}: an autoregressive run makes one call per token")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"steps: got {steps!r}, want a whole number, at least 0")
        self._steps = steps
        self._scorer = Scorer(
            self._model,
            paradigm,
            batch_size=values.get("batch_size", 1),
            max_batch_size=values.get("max_batch_size"),
            max_len=values.get("max_length"),
            draws=values.get("draws"),
            seed=values.get("seed", 0),
        )
        self._seed = self._scorer.seed
        self.max_length = self._scorer.max_len
        self.batch_size = values.get("batch_size", 1)
        specials = SpecialIds(*self.tokens.specials)
        self._writer = Writer(
            self._model,
            loaded.decoding.build(specials, paradigm),
            self.tokens,
            max_len=self.max_length,
            seed=self._seed,
        )
        self._deviations: list[float] = []
        self._chat: ChatTemplate | None = None
        logger.info("%s: %s", describe_device(), repr(loaded).partition("\n")[0])
        if self._scorer.draws:
            logger.warning(
                "%s: log-likelihoods are lower bounds, estimated with %d draws (seed %d)",
                self.path, self._scorer.draws, self._seed,
            )  # fmt: skip

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "GenlabLM":
        """Makes the model from `--model_args`, which win over the command line's own options."""
        own = {k: v for k, v in (additional_config or {}).items() if v is not None}
        if own.get("device") == DEFAULT_DEVICE:
            del own["device"]
        return cls(**(own | dict(arg_dict)))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "GenlabLM":
        """Makes the model from `path=RUN,batch_size=8`; see `create_from_arg_obj`."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods in nats of continuations, and whether each is the greedy one."""
        texts = [request.args for request in requests]
        pairs = [Pair(*encode_pair(self.tokens, *args)) for args in texts]
        longest = max((len(pair.continuation) for pair in pairs), default=0)
        cut = sum(sum(map(len, pair)) > self.max_length + 1 for pair in pairs)
        if cut:
            logger.warning(
                "%d of %d contexts are cut at their beginning: the model holds %d tokens",
                cut, len(pairs), self.max_length,
            )  # fmt: skip
        if longest > self.max_length:
            logger.warning(
                "a continuation has %d tokens, more than the model holds: it is scored in windows",
                longest,
            )

        def keep(number: int, answer: Scored) -> None:
            value = (answer.log_likelihood, answer.greedy)
            self.cache_hook.add_partial("loglikelihood", texts[number], value)

        scores = self._score(pairs, "loglikelihood", disable_tqdm, keep)
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods in nats of whole texts behind BOS, each token once, in windows."""
        texts = [request.args for request in requests]
        bos = [self.tokens.bos_id]
        pairs = []
        for (text,) in texts:
            ids = encode(self.tokens, text, bos=False)
            pairs.append(Pair(bos, ids[1:] if ids[:1] == bos else ids))

        def keep(number: int, answer: Scored) -> None:
            value = answer.log_likelihood
            self.cache_hook.add_partial("loglikelihood_rolling", texts[number], value)

        scores = self._score(pairs, "loglikelihood_rolling", disable_tqdm, keep)
        return [score.log_likelihood for score in scores]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers without the stop string that ended them, and without special tokens."""
        groups: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True, default=repr)].append(number)
        jobs: list[tuple[Wanted, list[int]]] = [
            (read_gen_kwargs(requests[own[0]].args[1], self.tokens, steps=self._steps), own)
            for own in groups.values()
        ]
        answers = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:
            for wanted, own in jobs:
                prompts = [self._prompt(requests[number].args[0]) for number in own]

                def keep(number: int, answer: str, own: list[int] = own) -> None:
                    args = requests[own[number]].args
                    self.cache_hook.add_partial("generate_until", args, answer)
                    bar.update()

                found = self._writer.answer(
                    prompts, wanted, rows_per_batch=self._scorer.rows_per_batch, progress=keep
                )
                for number, answer in zip(own, found, strict=True):
                    answers[number] = answer
        return answers

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text that messages become; without a generation prompt the last one stays open."""
        text = self._template().render(chat_history, answer=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the chat template, which the harness keeps with the results.

        Raises:
            ConfigError: a template is asked for by name, or there is none.
        """
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            raise ConfigError(
                f"--apply_chat_template {chat_template!r}: templates have no names here; leave out "
                "the name for the checkpoint's own"
            )
        self._template()
        folder = self._published()
        if (folder / TEMPLATE).exists():
            return (folder / TEMPLATE).read_text(encoding="utf-8")
        return json.dumps(json.loads((folder / SETTINGS).read_text())["chat_template"])

    @property
    def tokenizer_name(self) -> str:
        """Tells tokenizers apart in the harness's cache of requests."""
        return f"genlab-{self.tokens.kind}-{self.tokens.fingerprint[:16]}"

    def get_model_info(self) -> dict[str, Any]:
        """What the results file says of the model and of how it was scored."""
        draws = self._scorer.draws
        info = {
            "model_path": str(self.path),
            "model_num_parameters": self._model.num_params(),
            "model_dtype": str(np.dtype(self._model.dtype)),
            "max_length": self.max_length,
            "likelihood": "lower bound" if draws else "exact",
            "seed": self._seed,
        }
        if draws:
            info["likelihood_draws"] = draws
            if self._deviations:
                info["likelihood_standard_error_mean_nats"] = float(np.mean(self._deviations))
                info["likelihood_standard_error_max_nats"] = float(np.max(self._deviations))
        return info

    def _score(
        self,
        pairs: Sequence[Pair],
        name: str,
        disable_tqdm: bool,
        keep: Callable[[int, Scored], None],
    ) -> list[Scored]:
        with tqdm(total=len(pairs), disable=disable_tqdm, desc=name) as bar:

            def progress(number: int, answer: Scored) -> None:
                keep(number, answer)
                bar.update()

            scores = self._scorer.score(pairs, progress)
        self._deviations += [score.variance**0.5 for score in scores]
        return scores

    def _prompt(self, text: str) -> list[int]:
        return encode(self.tokens, text, bos=True) or [self.tokens.bos_id]

    def _published(self) -> Path:
        """The folder of the files that came with a checkpoint."""
        return self.path / SOURCE if (self.path / SOURCE).is_dir() else self.path

    def _template(self) -> ChatTemplate:
        if self._chat is None:
            self._chat = chat_template_of(self._published())
        return self._chat


if LM is not object:
    register_model(NAME)(GenlabLM)


def _require_device(device: Any) -> None:
    """Refuses to run on another device than asked for.

    Raises:
        ConfigError: there is no such device, or JAX uses another.
    """
    if device is None:
        return
    wanted = PLATFORMS.get(str(device).partition(":")[0])
    if wanted is None:
        raise ConfigError(f"device: got {device!r}{suggest(str(device), PLATFORMS)}")
    found = jax.devices()[0].platform
    if found != wanted:
        raise ConfigError(f"device: got {device!r}, but JAX {jax.__version__} found only {found}")
