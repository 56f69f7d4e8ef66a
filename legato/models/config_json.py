"""From a Hugging Face `config.json` to a `ModelSpec`: the dialects of the families, and their defaults.

An absent key has the value that its published config class gives it; both the keys of transformers 5
(`rope_parameters`) and the older ones (`rope_theta`, `rope_scaling`) are read. What cannot be computed as the
file asks is refused by name. It opens no weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from legato.models.config_keys import refuse_unknown, rope_type
from legato.models.spec import (
    Activation,
    Family,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    longest_context,
)
from legato.text.json_object import JsonObject, read_json_object

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SLIDES: dict[str, bool] = {"full_attention": False, "sliding_attention": True}
_MOST_LAYERS = 1024

_DEFAULTS: Mapping[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_QWEN_DEFAULTS: Mapping[str, object] = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000.0,
    "rope_theta": 1_000_000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}


# Read where they are there; they have no default in every family.
_OPTIONAL = (
    "layer_types",
    "num_attention_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_interleaved",
    "rope_parameters",
    "rope_scaling",
    "use_bidirectional_attention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelType:
    """What a value of `model_type` stands for. A size that has no default must be in the file."""

    family: Family
    architecture: str
    defaults: Mapping[str, object]


_MODEL_TYPES = {
    "llama": _ModelType(
        family="llama", architecture="LlamaForCausalLM", defaults={"max_position_embeddings": 2048}
    ),
    "mistral": _ModelType(
        family="mistral",
        architecture="MistralForCausalLM",
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _ModelType(family="qwen2", architecture="Qwen2ForCausalLM", defaults=_QWEN_DEFAULTS),
    "qwen3": _ModelType(
        family="qwen3", architecture="Qwen3ForCausalLM", defaults={**_QWEN_DEFAULTS, "head_dim": 128}
    ),
    "gemma3_text": _ModelType(family="gemma3", architecture="Gemma3ForCausalLM", defaults=_GEMMA3_DEFAULTS),
    "gemma3": _ModelType(
        family="gemma3", architecture="Gemma3ForConditionalGeneration", defaults=_GEMMA3_DEFAULTS
    ),
}


def spec_from_folder(folder: Path) -> ModelSpec:
    """The model that `folder`/config.json describes. Raises ModelError."""
    return spec_from_config(read_json_object(folder / "config.json"))


def spec_from_config(keys: JsonObject) -> ModelSpec:
    """The model that the content of a config.json describes.

    Of a Gemma 3 with vision only the text part is described. Raises ModelError for what is missing,
    nonsensical or not supported.
    """
    name = keys.choice("model_type", _MODEL_TYPES)
    model_type = _MODEL_TYPES[name]
    if keys.has("architectures") and keys.get("architectures") != [model_type.architecture]:
        raise keys.error("architectures", f"[{model_type.architecture!r}] for model_type {name}")
    _refuse_quantized(keys)
    defaults = {**_DEFAULTS, **model_type.defaults}
    if name == "gemma3":
        refuse_unknown(keys, ())
        keys = _text_part(keys)
    refuse_unknown(keys, {*defaults, *_OPTIONAL})
    return _spec(keys.over(defaults), model_type.family)


def _refuse_quantized(keys: JsonObject) -> None:
    if keys.has("quantization_config"):
        raise keys.error("quantization_config", "none (float16, bfloat16 or float32 weights), or a GGUF file")


def _text_part(keys: JsonObject) -> JsonObject:
    """The `text_config` of a model with vision. Its own flag for tied embeddings wins over the outer one."""
    if not keys.has("text_config"):
        raise keys.error("text_config", "an object")
    text = keys.section("text_config")
    text.over({"model_type": "gemma3_text"}).choice("model_type", ["gemma3_text"])
    _refuse_quantized(text)
    flag = "tie_word_embeddings"
    if text.has(flag) or not keys.has(flag):
        return text
    return replace(text, values={**text.values, flag: keys.flag(flag)})


def _spec(keys: JsonObject, family: Family) -> ModelSpec:
    gemma = family == "gemma3"
    hidden_size = keys.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = _heads(keys, hidden_size)
    rope, local_rope = _gemma3_ropes(keys) if gemma else _one_rope(keys)
    layers = tuple(
        LayerSpec(rope=rope if window is None else local_rope, window=window)
        for window in _windows(keys, family)
    )
    obeys_attention_bias = family in ("llama", "qwen3", "gemma3") and keys.flag("attention_bias")
    activation = keys.choice("hidden_activation" if gemma else "hidden_act", _ACTIVATIONS)
    for key in ("use_bidirectional_attention", "rope_interleaved"):
        if keys.get(key):
            raise keys.error(key, "false")
    return ModelSpec(
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=layers,
        max_position=longest_context(keys.integer("max_position_embeddings"), rope.scaling),
        norm_eps=keys.number("rms_norm_eps"),
        activation=_ACTIVATIONS[activation],
        qkv_bias=family == "qwen2" or obeys_attention_bias,
        o_bias=obeys_attention_bias,
        mlp_bias=family == "llama" and keys.flag("mlp_bias"),
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        tie_embeddings=keys.flag("tie_word_embeddings"),
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        attention_scale=(keys.number("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        attention_softcap=keys.number_or_none("attn_logit_softcapping") if gemma else None,
        logit_softcap=keys.number_or_none("final_logit_softcapping") if gemma else None,
    )


def _heads(keys: JsonObject, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, key-value heads, head size."""
    num_heads = keys.integer("num_attention_heads")
    num_kv_heads = keys.integer("num_key_value_heads") if keys.has("num_key_value_heads") else num_heads
    if num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    if not keys.has("head_dim") and hidden_size % num_heads:
        raise keys.error("head_dim", f"absent only if {num_heads} heads divide hidden_size = {hidden_size}")
    head_dim = keys.integer("head_dim") if keys.has("head_dim") else hidden_size // num_heads
    if head_dim % 2:
        raise keys.error("head_dim", f"an even number (it is {head_dim} here), since positions rotate pairs")
    return num_heads, num_kv_heads, head_dim


def _windows(keys: JsonObject, family: Family) -> list[int | None]:
    """Each layer's sliding window."""
    num_layers = keys.integer("num_hidden_layers", most=_MOST_LAYERS)
    has_window = family in ("mistral", "gemma3") or (
        family in ("qwen2", "qwen3") and keys.flag("use_sliding_window")
    )
    window = keys.integer("sliding_window") if has_window and keys.has("sliding_window") else None
    slides = [window is not None] * num_layers
    if family == "gemma3":
        period = keys.integer("sliding_window_pattern")
        slides = [(i + 1) % period != 0 for i in range(num_layers)]
    elif family in ("qwen2", "qwen3") and window is not None:
        first = keys.integer("max_window_layers", least=0)
        slides = [i >= first for i in range(num_layers)]
    if keys.has("layer_types"):
        listed = _listed_layer_types(keys, num_layers)
        if family in ("llama", "mistral") and listed != slides:
            raise keys.error("layer_types", f"absent for {family}, whose layers are all alike")
        slides = listed
    if any(slides) and window is None:
        raise keys.error("sliding_window", "an integer, since some layers have sliding attention")
    return [window if slide else None for slide in slides]


def _listed_layer_types(keys: JsonObject, num_layers: int) -> list[bool]:
    """Whether each layer slides, by `layer_types`."""
    listed = keys.get("layer_types")
    if (
        not isinstance(listed, list)
        or len(listed) != num_layers
        or not set(map(str, listed)) <= _SLIDES.keys()
    ):
        raise keys.error("layer_types", f"a list of {num_layers}, each {' or '.join(_SLIDES)}")
    return [_SLIDES[kind] for kind in listed]


def _one_rope(keys: JsonObject) -> tuple[RopeSpec, RopeSpec]:
    """The rope of all layers, as (full, sliding)."""
    old, new = keys.section("rope_scaling"), keys.section("rope_parameters")
    if not _SLIDES.keys().isdisjoint(new.values):
        raise keys.error("rope_parameters", "one object for all layers")
    rope = _rope(old if old.values else new, keys, "rope_theta")
    return rope, rope


def _gemma3_ropes(keys: JsonObject) -> tuple[RopeSpec, RopeSpec]:
    """The rope of full layers and of sliding ones: the older keys scale full layers only."""
    by_type = keys.section("rope_parameters")
    if by_type.values and not set(by_type.values) <= _SLIDES.keys():
        raise keys.error("rope_parameters", f"an object with {' and '.join(_SLIDES)}")
    full = by_type.section("full_attention")
    if keys.has("rope_scaling"):
        full = keys.section("rope_scaling").over(full.values)
    sliding = by_type.section("sliding_attention")
    return _rope(full, keys, "rope_theta"), _rope(sliding, keys, "rope_local_base_freq")


def _rope(parameters: JsonObject, keys: JsonObject, base_key: str) -> RopeSpec:
    """One kind of layer's rope; a base that `parameters` does not state is `keys`' `base_key`."""
    for holder in (parameters, keys):
        if holder.has("partial_rotary_factor") and holder.get("partial_rotary_factor") != 1:
            raise holder.error("partial_rotary_factor", "1")
    if parameters.has("rope_theta"):
        base = parameters.number("rope_theta", above=1)
    else:
        base = keys.number(base_key, above=1)
    scaling: RopeScaling | None = None
    match rope_type(parameters):
        case "linear":
            scaling = LinearScaling(factor=parameters.number("factor"))
        case "llama3":
            scaling = _llama3(parameters, keys)
        case "yarn":
            scaling = _yarn(parameters, keys)
    return RopeSpec(base=base, scaling=scaling)


def _llama3(parameters: JsonObject, keys: JsonObject) -> Llama3Scaling:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.error("high_freq_factor", f"a number above low_freq_factor = {low:g}")
    return Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_original_max_position(parameters, keys),
    )


def _yarn(parameters: JsonObject, keys: JsonObject) -> YarnScaling:
    """YaRN, whose attention factor is 0.1 ln(factor) + 1 unless stated (Peng et al. 2023, equation 22)."""
    factor = parameters.number("factor")

    def sharpened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = sharpened(1.0)
    if parameters.has("attention_factor"):
        attention_factor = parameters.number("attention_factor")
    elif parameters.has("mscale") and parameters.has("mscale_all_dim"):
        attention_factor = sharpened(parameters.number("mscale")) / sharpened(
            parameters.number("mscale_all_dim")
        )
    defaults = parameters.over({"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True})
    return YarnScaling(
        factor=factor,
        original_max_position=_original_max_position(parameters, keys),
        beta_fast=defaults.number("beta_fast"),
        beta_slow=defaults.number("beta_slow"),
        attention_factor=attention_factor,
        truncate=defaults.flag("truncate"),
    )


def _original_max_position(parameters: JsonObject, keys: JsonObject) -> int:
    """Longest context before scaling: the outer key wins over the inner, as in the published classes."""
    key = "original_max_position_embeddings"
    for holder in (keys, parameters):
        if holder.has(key):
            return holder.integer(key)
    return keys.integer("max_position_embeddings")
