"""Which keys of a config.json are refused because they may change what is computed and are not obeyed.

A config.json holds many keys that only training or other programs read, so an unknown key alone is no fault.
One whose name speaks of what the layers compute (a scale, a cap, experts, a window, a norm, a rotation) is
refused: ignoring it would give replies that read well and are wrong. Values that switch nothing on pass.
"""

import re
from collections.abc import Collection

from legato.text.json_object import JsonObject

_TELLING = re.compile(
    r"(alibi|attention|attn|bias|chunk|clamp|clip|expert|logit|lora|moe|mrope|multiplier|nope|norm|qk|residual"
    r"|rope|rotary|router|scal|sink|softcap|temperature|window).*|.*norm"
)
# Read by training, by generation or by the choice of a kernel.
_WITHOUT_EFFECT = re.compile(
    r"_.*|.*(dropout|flash|implementation|initializ|kernel).*"
    r"|attention_probs_.*|chunk_size_feed_forward|layer_norm_eps(ilon)?|output_attentions|temperature"
    r"|(output_)?router_(aux_loss|jitter|z_loss)?.*"
)
_ROPE_KEYS = (
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
)
_ROPE_KEYS_BY_TYPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def refuse_unknown(keys: JsonObject, known: Collection[str]) -> None:
    """Raises ModelError for the first key that is not `known`, may change the computation and is in use."""
    for key, value in keys.values.items():
        if key in known or _WITHOUT_EFFECT.fullmatch(key):
            continue
        telling = any(_TELLING.fullmatch(word) for word in re.split(r"[^a-z0-9]+", key.lower()))
        if telling and _is_in_use(value):
            raise keys.error(key, "absent for this model_type, since it may change what is computed")


def rope_type(parameters: JsonObject) -> str:
    """The checked type of rope, under its newer or its older key.

    Raises ModelError for an unknown type, and for parameters that the type does not have.
    """
    key = "rope_type" if parameters.has("rope_type") else "type"
    kind = parameters.choice(key, _ROPE_KEYS_BY_TYPE) if parameters.has(key) else "default"
    for other, value in parameters.values.items():
        if other not in _ROPE_KEYS + _ROPE_KEYS_BY_TYPE[kind] and _is_in_use(value):
            raise parameters.error(other, f"absent for rope type {kind}")
    return kind


def _is_in_use(value: object) -> bool:
    """Whether a value switches something on: not null, false, nothing, or a factor of 1."""
    return bool(value) and (isinstance(value, bool) or value != 1)
