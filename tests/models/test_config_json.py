"""Reading config.json: defaults against the published config classes, older keys, and refusals by name."""

import json
import math

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.errors import ModelError
from legato.models.config_json import spec_from_config, spec_from_folder
from legato.models.spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from legato.text.json_object import JsonObject

CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma3_text": "Gemma3TextConfig",
    "gemma3": "Gemma3Config",
}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}

# As published on the hub, with the keys of their time.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_NEMO = {
    **MISTRAL_7B,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN_2_5_7B_WITH_YARN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PUBLISHED = {
    "Llama 3.1 8B": LLAMA_3_1_8B,
    "Mistral 7B": MISTRAL_7B,
    "Mistral Nemo": MISTRAL_NEMO,
    "Qwen 2.5 7B with YaRN": QWEN_2_5_7B_WITH_YARN,
    "Qwen 3 4B": QWEN_3_4B,
    "Gemma 3 1B": GEMMA_3_1B,
    "Gemma 3 4B": GEMMA_3_4B,
}
SPARSE = {name: {**SIZES, "model_type": name} for name in CLASSES if name != "gemma3"} | {
    "gemma3_text, no heads": {
        **{key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        "model_type": "gemma3_text",
    },
    "qwen2, all heads": {**SIZES, "model_type": "qwen2", "num_key_value_heads": None},
    "qwen2, upper layers slide": {**SIZES, "model_type": "qwen2", "use_sliding_window": True},
    "qwen3, all layers slide": {
        **SIZES,
        "model_type": "qwen3",
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
    "qwen3, window off": {**SIZES, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": None},
    "gemma3_text, every other layer": {**SIZES, "model_type": "gemma3_text", "sliding_window_pattern": 2},
    "gemma3_text, untied": {**SIZES, "model_type": "gemma3_text", "tie_word_embeddings": False},
    "llama, linear rope of old": {
        **SIZES,
        "model_type": "llama",
        "rope_scaling": {"type": "linear", "factor": 4},
    },
    "llama, yarn without the original length": {
        **SIZES,
        "model_type": "llama",
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    },
}


def read(config):
    return spec_from_config(JsonObject(values=config, where="models/x/config.json"))


@pytest.mark.parametrize("config", (PUBLISHED | SPARSE).values(), ids=PUBLISHED | SPARSE)
def test_absent_and_older_keys_mean_what_the_published_class_makes_of_them(config):
    """F-07, F-12, F-17: the class fills in every default and rewrites older keys; both must read alike."""
    filled = getattr(transformers, CLASSES[config["model_type"]])(**json.loads(json.dumps(config))).to_dict()
    assert "rope_parameters" in filled.get("text_config", filled)
    assert read(json.loads(json.dumps(filled))) == read(config)


def test_an_explicit_head_size_wins_and_an_absent_one_is_the_quotient():
    """F-17"""
    qwen, nemo, mistral = read(QWEN_3_4B), read(MISTRAL_NEMO), read(MISTRAL_7B)
    assert (qwen.head_dim, nemo.head_dim, mistral.head_dim) == (128, 128, 4096 // 32)
    assert qwen.tensor_shapes()["layers.0.q"] == (4096, 2560)
    assert qwen.attention_scale == 128**-0.5


def test_gemma_scales_global_layers_only_and_every_sixth_layer_is_global():
    """F-12, F-13"""
    spec = read(GEMMA_3_4B)
    for i, layer in enumerate(spec.layers):
        if i % 6 == 5:
            assert layer.window is None
            assert layer.rope == RopeSpec(base=1_000_000.0, scaling=LinearScaling(factor=8.0))
        else:
            assert layer.window == 1024
            assert layer.rope == RopeSpec(base=10_000.0)
    assert spec.tie_embeddings
    assert math.isclose(spec.embedding_scale, math.sqrt(2560))


@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_of_a_model_with_vision_the_text_part_s_own_flag_ties_the_embedding(inner, outer):
    """F-06, F-08: the flag nearest to the text model decides, then the outer one, then the class's own."""
    flag = "tie_word_embeddings"
    text = GEMMA_3_4B["text_config"] | ({} if inner is None else {flag: inner})
    config = GEMMA_3_4B | {"text_config": text} | ({} if outer is None else {flag: outer})
    stated = [value for value in (inner, outer) if value is not None]
    assert read(config).tie_embeddings == (stated[0] if stated else True)


def test_listed_layer_types_win_over_the_pattern():
    """F-12"""
    types = ["full_attention", "sliding_attention"] * 13
    windows = [layer.window for layer in read({**GEMMA_3_1B, "layer_types": types}).layers]
    assert windows == [None, 512] * 13


def test_scaled_ropes_are_read_in_full():
    llama, qwen = read(LLAMA_3_1_8B), read(QWEN_2_5_7B_WITH_YARN)
    assert llama.layers[0].rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    assert qwen.layers[0].rope.scaling == YarnScaling(
        factor=4.0, original_max_position=32768, attention_factor=0.1 * math.log(4) + 1
    )


def test_yarn_makes_the_context_longer_and_other_scalings_keep_the_stated_one():
    assert read(QWEN_2_5_7B_WITH_YARN).max_position == 4 * 32768
    longer = {**QWEN_2_5_7B_WITH_YARN, "max_position_embeddings": 10**6}
    assert read(longer).max_position == 4 * 32768
    assert read(QWEN_2_5_7B_WITH_YARN | {"rope_scaling": None}).max_position == 32768
    assert read(LLAMA_3_1_8B).max_position == 131072


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        (QWEN_2_5_7B_WITH_YARN, (True, False, False)),
        ({**LLAMA_3_1_8B, "attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ({**QWEN_3_4B, "attention_bias": True}, (True, True, False)),
        (MISTRAL_7B, (False, False, False)),
    ],
)
def test_biases_of_each_family(config, biases):
    spec = read(config)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == biases


def without(config, key):
    return {name: value for name, value in config.items() if name != key}


def with_rope(**parameters):
    return {**LLAMA_3_1_8B, "rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], **parameters}}


REFUSED = {
    "no model_type": (without(LLAMA_3_1_8B, "model_type"), ["model_type is missing", "gemma3_text"]),
    "unknown model_type": ({**LLAMA_3_1_8B, "model_type": "mamba"}, ["model_type is 'mamba'", "qwen3"]),
    "odd model_type": ({**LLAMA_3_1_8B, "model_type": ["llama"]}, ["model_type is ['llama']"]),
    "another head": (
        {**LLAMA_3_1_8B, "architectures": ["LlamaForSequenceClassification"]},
        ["architectures", "LlamaForSequenceClassification", "LlamaForCausalLM"],
    ),
    "quantized": (
        {**LLAMA_3_1_8B, "quantization_config": {"quant_method": "gptq"}},
        ["quantization_config", "gptq", "GGUF"],
    ),
    "quantized text part": (
        {**GEMMA_3_4B, "text_config": {**GEMMA_3_4B["text_config"], "quantization_config": {"bits": 4}}},
        ["text_config.quantization_config"],
    ),
    "no hidden_size": (without(LLAMA_3_1_8B, "hidden_size"), ["hidden_size is missing", "an integer from 1"]),
    "no layers": ({**LLAMA_3_1_8B, "num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
    "a million layers": ({**LLAMA_3_1_8B, "num_hidden_layers": 10**6}, ["num_hidden_layers", "1024"]),
    "boolean size": ({**LLAMA_3_1_8B, "vocab_size": True}, ["vocab_size is True"]),
    "fraction": ({**LLAMA_3_1_8B, "intermediate_size": 1.5}, ["intermediate_size is 1.5"]),
    "huge": ({**LLAMA_3_1_8B, "hidden_size": 10**30}, ["hidden_size is 1000", "2147483647"]),
    "text for a number": ({**LLAMA_3_1_8B, "rms_norm_eps": "1e-5"}, ["rms_norm_eps is '1e-5'"]),
    "not a number": ({**LLAMA_3_1_8B, "rms_norm_eps": math.nan}, ["rms_norm_eps is nan"]),
    "infinite base": ({**LLAMA_3_1_8B, "rope_theta": math.inf}, ["rope_theta is inf"]),
    "base of one": ({**LLAMA_3_1_8B, "rope_theta": 1.0}, ["rope_theta is 1.0", "above 1"]),
    "text for a flag": ({**LLAMA_3_1_8B, "tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'"]),
    "heads do not divide": ({**LLAMA_3_1_8B, "num_key_value_heads": 5}, ["num_key_value_heads is 5", "32"]),
    "no quotient": ({**LLAMA_3_1_8B, "hidden_size": 4097}, ["head_dim is missing", "4097"]),
    "odd head": ({**LLAMA_3_1_8B, "head_dim": 127}, ["head_dim is 127", "even"]),
    "activation": ({**LLAMA_3_1_8B, "hidden_act": "relu"}, ["hidden_act is 'relu'", "silu"]),
    "odd activation": ({**LLAMA_3_1_8B, "hidden_act": ["silu"]}, ["hidden_act is ['silu']"]),
    "Gemma's activation": ({**GEMMA_3_1B, "hidden_activation": "gelu"}, ["hidden_activation is 'gelu'"]),
    "unknown rope": (with_rope(rope_type="longrope"), ["rope_scaling.rope_type is 'longrope'", "yarn"]),
    "unknown rope of old": (
        {**LLAMA_3_1_8B, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        ["rope_scaling.type is 'dynamic'"],
    ),
    "su": (with_rope(rope_type="su", short_factor=[1.0]), ["rope_scaling.rope_type is 'su'", "linear"]),
    "proportional rope": (
        {**QWEN_3_4B, "rope_parameters": {"rope_type": "proportional", "rope_theta": 5.0}},
        ["rope_parameters.rope_type is 'proportional'"],
    ),
    "interleaved rope": ({**LLAMA_3_1_8B, "rope_interleaved": True}, ["rope_interleaved is True", "false"]),
    "rope is no object": ({**LLAMA_3_1_8B, "rope_scaling": 8}, ["rope_scaling is 8", "an object"]),
    "unknown rope, new key": (with_rope(rope_type="foo"), ["rope_scaling.rope_type is 'foo'", "llama3"]),
    "unknown rope, older key": (
        {**LLAMA_3_1_8B, "rope_scaling": {"type": "foo", "factor": 2.0}},
        ["rope_scaling.type is 'foo'", "default, linear, llama3, yarn"],
    ),
    "scaling without a type": (
        {**LLAMA_3_1_8B, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 8192}},
        ["rope_scaling.factor is 4.0", "absent for rope type default"],
    ),
    "a parameter of another rope": (
        {**QWEN_3_4B, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
        ["rope_scaling.beta_fast is 32", "absent for rope type linear"],
    ),
    "rope over images": (
        {**QWEN_3_4B, "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        ["rope_scaling.mrope_section is [16, 24, 24]"],
    ),
    "no factor": (with_rope(factor=None), ["rope_scaling.factor is None"]),
    "negative factor": (with_rope(factor=-8.0), ["rope_scaling.factor is -8.0"]),
    "bands crossed": (with_rope(low_freq_factor=4.0), ["high_freq_factor is 4.0", "above low_freq_factor"]),
    "part of a head rotates": (
        {**LLAMA_3_1_8B, "partial_rotary_factor": 0.5},
        ["partial_rotary_factor is 0.5"],
    ),
    "ropes by layer": (
        {**QWEN_3_4B, "rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        ["rope_parameters", "one object for all layers"],
    ),
    "one rope for Gemma": (
        {**GEMMA_3_1B, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        ["rope_parameters", "full_attention", "sliding_attention"],
    ),
    "unknown layer type": (
        {**GEMMA_3_1B, "layer_types": ["chunked_attention"] * 26},
        ["layer_types", "chunked_attention", "a list of 26"],
    ),
    "too few layer types": ({**GEMMA_3_1B, "layer_types": ["full_attention"]}, ["a list of 26"]),
    "odd layer types": ({**GEMMA_3_1B, "layer_types": [["full_attention"]] * 26}, ["layer_types"]),
    "layers that Mistral lacks": (
        {**MISTRAL_7B, "layer_types": ["full_attention", "sliding_attention"] * 16},
        ["layer_types", "absent for mistral"],
    ),
    "no window to slide": ({**GEMMA_3_1B, "sliding_window": None}, ["sliding_window is None"]),
    "both directions": ({**GEMMA_3_1B, "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    "no text part": (without(GEMMA_3_4B, "text_config"), ["text_config is missing"]),
    "text part is no object": ({**GEMMA_3_4B, "text_config": []}, ["text_config is []"]),
    "another text part": ({**GEMMA_3_4B, "text_config": {"model_type": "llama"}}, ["text_config.model_type"]),
    "text part's fault": (
        {**GEMMA_3_4B, "text_config": {**GEMMA_3_4B["text_config"], "hidden_size": 0}},
        ["text_config.hidden_size is 0"],
    ),
}


CHANGES_THE_COMPUTATION = {
    "attention_chunk_size": 8192,
    "attention_multiplier": 0.0078125,
    "attn_logit_softcapping": 50.0,
    "clip_qkv": 8.0,
    "dual_chunk_attention_config": {"chunk_size": 262144},
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "kv_lora_rank": 512,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "no_rope_layers": [1, 1, 1, 0],
    "num_experts": 64,
    "num_local_experts": 8,
    "query_pre_attn_scalar": 144,
    "residual_multiplier": 0.22,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "sliding_window": 4096,
    "use_qk_norm": True,
    "use_parallel_residual": True,
}


@pytest.mark.parametrize("key", CHANGES_THE_COMPUTATION)
def test_a_key_of_other_families_that_changes_what_is_computed_is_refused_by_name(key):
    """F-14: each is obeyed in the family that has it; in a Llama it would be ignored."""
    value = CHANGES_THE_COMPUTATION[key]
    with pytest.raises(ModelError) as caught:
        read({**LLAMA_3_1_8B, key: value})
    assert f"{key} is {value!r}" in caught.value.message
    for neutral in (None, False, 0, [], {}, 1.0):
        assert read({**LLAMA_3_1_8B, key: neutral}) == read(LLAMA_3_1_8B)


@pytest.mark.parametrize(
    "key", ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"]
)
def test_gemma_obeys_its_scale_and_caps_wherever_they_stand(key):
    """F-14: in the text part as in a model of text only; beside the text part it is refused."""
    fields = {
        "attn_logit_softcapping": lambda spec: spec.attention_softcap,
        "final_logit_softcapping": lambda spec: spec.logit_softcap,
        "query_pre_attn_scalar": lambda spec: spec.attention_scale**-2,
    }
    nested = {**GEMMA_3_4B, "text_config": {**GEMMA_3_4B["text_config"], key: 144.0}}
    for config in ({**GEMMA_3_1B, key: 144.0}, nested):
        assert fields[key](read(config)) == pytest.approx(144)
    with pytest.raises(ModelError, match=key):
        read({**GEMMA_3_4B, key: 144.0})


def test_keys_that_only_training_and_other_programs_read_are_no_fault():
    beside = {
        "_attn_implementation": "sdpa",
        "_flash_attn_2_enabled": True,
        "_name_or_path": "meta-llama/Llama-3.1-8B",
        "attention_dropout": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "attn_implementation": "flash_attention_2",
        "bos_token_id": 128000,
        "cache_implementation": "hybrid",
        "initializer_range": 0.02,
        "is_llama_config": True,
        "max_window_layers": 28,
        "output_attentions": True,
        "output_router_logits": True,
        "pretraining_tp": 2,
        "quantization": None,
        "sliding_window": None,
        "task_specific_params": {"a": 1},
        "temperature": 0.7,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"dtype": "q4"},
        "unsloth_version": "2026.1",
        "use_cache": True,
        "use_flash_attn": True,
        "use_mrope": False,
        "use_sliding_window": False,
    }
    assert read({**QWEN_3_4B, **beside}) == read(QWEN_3_4B)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_the_rope_type_mean_the_same_in_both_places(key, place):
    """F-21"""
    yarn = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**QWEN_3_4B, "rope_scaling": None, place: yarn}
    spec = read(config)
    assert spec.layers[0].rope.scaling == YarnScaling(
        factor=4.0, original_max_position=32768, attention_factor=0.1 * math.log(4) + 1
    )
    assert spec.max_position == 131072


@pytest.mark.parametrize(("config", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line_with_file_key_and_value(config, words):
    with pytest.raises(ModelError) as caught:
        read(config)
    message = caught.value.message
    assert message.startswith("models/x/config.json: ")
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing"),
        (b"", "not JSON"),
        (b'{"model_type": "llama"', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "holds a JSON list"),
        (b"{}", "model_type is missing"),
    ],
)
def test_a_config_file_that_is_absent_or_not_a_json_object_is_named(content, words, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        spec_from_folder(tmp_path)
    assert caught.value.message.startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in caught.value.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=5,
)
rope_keys = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


@given(st.sampled_from(sorted(PUBLISHED)), st.data())
@settings(max_examples=300, deadline=None)
def test_any_value_under_any_key_gives_a_model_or_a_model_error(name, data):
    config = dict(PUBLISHED[name])
    key = data.draw(
        st.sampled_from([*sorted(config), "layer_types", "rope_parameters", "sliding_window_pattern"])
    )
    rope = st.fixed_dictionaries({}, optional=dict.fromkeys(rope_keys, json_values | st.just("yarn")))
    config[key] = data.draw(json_values | rope | rope.map(lambda one: {"full_attention": one}))
    try:
        spec = read(config)
    except ModelError as error:
        message = error.message
    else:
        assert spec.num_layers == len(spec.layers) > 0
        return
    assert message.startswith("models/x/config.json: ")
    assert "\n" not in message
