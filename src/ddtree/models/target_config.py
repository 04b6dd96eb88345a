"""What a target decoder of the Llama, Qwen2 or Qwen3 family looks like."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.models.config_file import ConfigFile, read_json_object
from ddtree.models.rope import RopeSettings, read_rope

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class LayerShape:
    """Sizes that a decoder layer of the target and of the drafter have in common."""

    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def kv_size(self) -> int:
        """Numbers that one token keeps in the cache of one layer."""
        return 2 * self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class TargetConfig:
    """A target decoder.

    Attributes:
        sliding_windows: per layer, the number of positions a query sees (itself included), or None for all.
        max_positions: context length that the checkpoint states.
        eos_token_ids: tokens that end an answer, from `config.json` and `generation_config.json`.
        ignored_keys: keys of `config.json` that cannot affect inference and were not used.
    """

    family: str
    vocab_size: int
    n_layers: int
    layer: LayerShape
    rope: RopeSettings
    tied_head: bool
    sliding_windows: tuple[int | None, ...]
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    ignored_keys: tuple[str, ...]


def read_layer_shape(file: ConfigFile, family: str) -> LayerShape:
    """Read the sizes of a layer and check that they fit together."""
    hidden_size, n_heads = file.positive("hidden_size"), file.positive("num_attention_heads")
    n_kv_heads = file.positive("num_key_value_heads", n_heads)
    default_head_dim = 128 if family == "qwen3" else hidden_size // n_heads
    head_dim = file.positive("head_dim", default_head_dim)
    if head_dim % 2:
        raise file.refuse(f"head_dim {head_dim} is odd, rotary embeddings need pairs", "correct the config")
    if n_heads % n_kv_heads:
        raise file.refuse(
            f"num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}", "correct the config"
        )
    if (activation := file.get("hidden_act", str, "silu")) not in ("silu", "swish"):
        raise file.refuse(f"hidden_act {activation!r} is not supported", "take a model with hidden_act 'silu'")
    norm_eps = file.get("rms_norm_eps", (float, int), 1e-6)
    if not 0 < norm_eps < 1:
        raise file.refuse(f"rms_norm_eps is {norm_eps}", "it must lie between 0 and 1")
    attention_bias = file.get("attention_bias", bool, False)
    if family == "qwen2" and "attention_bias" in file.values and not attention_bias:
        raise file.refuse("attention_bias false contradicts the qwen2 family", "remove the key")
    return LayerShape(
        hidden_size=hidden_size,
        intermediate_size=file.positive("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        norm_eps=float(norm_eps),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=file.get("mlp_bias", bool, False) if family == "llama" else False,
        qk_norm=family == "qwen3",
    )


def read_sliding_windows(file: ConfigFile, n_layers: int) -> tuple[int | None, ...]:
    """Per layer, its sliding window or None (`layer_types` wins over `max_window_layers`, as in transformers)."""
    kinds: list[Any] | None = file.get("layer_types", list)
    use_sliding = file.get("use_sliding_window", bool, kinds is not None)
    # What an absent key means is what transformers takes it for.
    window = file.get("sliding_window", int, None if "sliding_window" in file.values else 4096)
    first_sliding = file.get("max_window_layers", int, 28)
    if kinds is None:
        sliding = use_sliding and window is not None
        kinds = ["sliding_attention" if sliding and i >= first_sliding else "full_attention" for i in range(n_layers)]
    if len(kinds) != n_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise file.refuse(
            f"layer_types must give 'full_attention' or 'sliding_attention' for each of {n_layers} layers",
            "correct layer_types",
        )
    if "sliding_attention" in kinds and (not use_sliding or window is None or window < 1):
        raise file.refuse(
            "layer_types asks for sliding_attention, but use_sliding_window and sliding_window do not",
            "set use_sliding_window true and sliding_window to at least 1",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _token_ids(file: ConfigFile, value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise file.refuse(f"eos_token_id is {value!r}", "give a token id or a list of them")
    return tuple(ids)


def read_target_config(folder: Path) -> TargetConfig:
    """Read and check `config.json` (and `generation_config.json` for end tokens) of a target folder.

    Raises:
        UserError: not a model of the known families, or a key that would be ignored.
    """
    file = ConfigFile(folder, "model")
    file.refuse_quantised()
    family = file.get("model_type", str, "")
    architectures = file.get("architectures", list, [])
    if family not in FAMILIES or any(name != FAMILIES[family] for name in architectures):
        raise file.refuse(
            f"model_type {family!r} with architectures {architectures} is not supported",
            f"take a model of one of {', '.join(FAMILIES.values())}",
        )
    n_layers = file.positive("num_hidden_layers")
    layer = read_layer_shape(file, family)
    if (ranks := file.get("pretraining_tp", int, 1)) != 1:
        raise file.refuse(f"pretraining_tp {ranks} is not supported", "set it to 1: the weights are the same")
    if file.get("rope_interleaved", bool, False):
        raise file.refuse("rope_interleaved true is not supported", "convert the weights to the half-split order")
    windows = read_sliding_windows(file, n_layers) if family != "llama" else (None,) * n_layers
    max_positions = file.positive("max_position_embeddings", 2048)
    eos = _token_ids(file, file.get("eos_token_id", (int, list)))
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = tuple(dict.fromkeys((*eos, *_token_ids(file, read_json_object(generation).get("eos_token_id")))))
    return TargetConfig(
        family=family,
        vocab_size=file.positive("vocab_size"),
        n_layers=n_layers,
        layer=layer,
        rope=read_rope(file, layer.head_dim, max_positions, 10000.0),
        tied_head=file.get("tie_word_embeddings", bool, False),
        sliding_windows=windows,
        max_positions=max_positions,
        bos_token_id=file.get("bos_token_id", int),
        eos_token_ids=eos,
        dtype=str(file.values.get("dtype") or file.values.get("torch_dtype") or "float32"),
        ignored_keys=file.close(),
    )
