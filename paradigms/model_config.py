"""The configuration of a model: kinds of layers, their pattern, and both ends."""

from typing import TYPE_CHECKING, Any, Literal

from flax import nnx
from pydantic import Field, model_validator

from ..errors import ConfigError, suggest
from .blocks.block import Parts
from .blocks.prenorm import PreNormConfig
from .config import Config
from .layers.ends import InputConfig, OutputConfig
from .mixers.attention import check_reuse
from .registry import BlockConfig, MixerConfig, MlpConfig

if TYPE_CHECKING:
    from .backbone import Backbone


class LayerConfig(Config):
    """One kind of layer.

    Attributes:
        block: how mixer and MLP are wired.
        mixer: null for a layer that does not mix time.
        mixers: instead of `mixer`, for blocks that have several.
        mlp: null for a layer without MLP.
    """

    block: BlockConfig = PreNormConfig()
    mixer: MixerConfig | None = None
    mixers: tuple[MixerConfig, ...] = ()
    mlp: MlpConfig | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> "LayerConfig":
        if self.mixer is not None and self.mixers:
            raise ValueError("give mixer or mixers, not both")
        if not self.all_mixers and self.mlp is None:
            raise ValueError("a layer needs a mixer, an mlp or both")
        reason = self.block.refuses(self.parts(0.0))
        if reason is not None:
            raise ValueError(reason)
        return self

    @property
    def all_mixers(self) -> tuple[Any, ...]:
        """The mixers in order, however they were given."""
        return self.mixers if self.mixer is None else (self.mixer,)

    def parts(self, dropout_rate: float) -> Parts:
        """What a block is built from."""
        return Parts(self.all_mixers, self.mlp, dropout_rate)


class ModelConfig(Config):
    """A stack of layers.

    Attributes:
        width: D.
        depth: number of layers; null means once through the pattern. The pattern repeats.
        pattern: names of layer kinds in order.
        layers: the layer kinds by name.
        share_layers: all layers of a kind have the same parameters (ALBERT, arXiv 1909.11942, sec.
            3.1); their states are their own.
        max_len: tokens in the longest row, prompt and continuation together.
        vocab_size: V; null is filled in from the tokenizer.
        pad_vocab_to: the embedding's rows are rounded up to a multiple of this; the padded ids
            have no probability.
        tie_embeddings: the head is the embedding's transpose.
        dropout: rate on the embedding and on what each mixer and MLP adds.
        norm: kind of the blocks' norms and of those at the ends: `rms`, or `layer` with mean and
            bias. Norms inside of mixers are RMS norms in either case.
        norm_eps: epsilon of the norms.
        final_norm: normalise what the last layer returns; false for post-norm layers as published,
            which do so themselves.
        inputs: what is added to a token's row of the embedding.
        output: what stands before and behind the head's matrix.
        meta_tokens: learnt tokens that every document begins with (Hymba, arXiv 2411.13676, sec.
            2.2). They take the first positions, are seen by every token whatever the window, and
            are not part of the rows: they cost no place in `max_len`.
    """

    width: int = Field(ge=1)
    depth: int | None = Field(default=None, ge=1)
    pattern: tuple[str, ...] = Field(min_length=1)
    layers: dict[str, LayerConfig]
    share_layers: bool = False
    max_len: int = Field(ge=2)
    vocab_size: int | None = Field(default=None, ge=1)
    pad_vocab_to: int = Field(default=1, ge=1)
    tie_embeddings: bool = True
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = Field(default=1e-5, gt=0.0)
    final_norm: bool = True
    inputs: InputConfig = InputConfig()
    output: OutputConfig = OutputConfig()
    meta_tokens: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _pattern_is_known(self) -> "ModelConfig":
        for name in self.pattern:
            if name not in self.layers:
                raise ValueError(f"pattern names layer {name!r}{suggest(name, self.layers)}")
        for name in self.layers:
            if name not in self.pattern:
                raise ValueError(f"layer {name!r} is not used by pattern {list(self.pattern)}")
        reason = self.inputs.refuses(self.max_len, self.meta_tokens)
        if reason is not None:
            raise ValueError(reason)
        if self.tie_embeddings and self.inputs.width is not None and self.output.transform is None:
            raise ValueError(
                f"inputs.width={self.inputs.width} with a tied head needs output.transform, which "
                "brings the head to that width"
            )
        reason = check_reuse(m for kind in self.stack for m in self.layers[kind].all_mixers)
        if reason is not None:
            raise ValueError(reason)
        return self

    @property
    def stack(self) -> tuple[str, ...]:
        """The kind of every layer, bottom first."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @property
    def homes(self) -> tuple[int, ...]:
        """For every layer the first one that has its parameters: itself, or one of its kind."""
        stack = self.stack
        return tuple(stack.index(k) if self.share_layers else i for i, k in enumerate(stack))

    @property
    def embedding_width(self) -> int:
        """Columns of the embedding."""
        return self.inputs.width or self.width

    @property
    def head_width(self) -> int:
        """What the head's matrix reads."""
        return self.width if self.output.transform is None else self.embedding_width

    @property
    def num_layers(self) -> int:
        """Layers in the stack."""
        return len(self.pattern) if self.depth is None else self.depth

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding.

        Raises:
            ConfigError: `vocab_size` is not known yet.
        """
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size: not set, and no tokenizer has filled it in")
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    def build(self, rngs: nnx.Rngs) -> "Backbone":
        """Makes the module with fresh parameters."""
        from .backbone import Backbone  # which needs this module

        return Backbone(self, rngs)
