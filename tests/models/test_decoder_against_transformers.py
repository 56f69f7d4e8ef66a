"""The decoder, its loader and its config reader against Hugging Face transformers on tiny random models.

Every family, whole and in chunks through scattered blocks: the logits of all positions must agree.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_gguf import convert, write_gguf
from transformers.models.gemma3 import modeling_gemma3

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not 48 / 4
    "max_position_embeddings": 4096,
}
GEMMA = {
    **SIZES,
    "num_hidden_layers": 6,  # five sliding, one full
    "sliding_window": 6,
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 3.0,
}
GGUF_GEMMA = {**GEMMA, "query_pre_attn_scalar": SIZES["head_dim"]}
"""A GGUF file has no key for the scalar: llama.cpp takes the size of the heads."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SCALED_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama_all_heads_alike": ("LlamaConfig", {**SIZES, "num_key_value_heads": 4}),
    "llama_biases_and_tied": (
        "LlamaConfig",
        {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama_llama3_rope": ("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama_yarn_rope": ("LlamaConfig", {**SIZES, "rope_parameters": YARN_ROPE}),
    "llama_yarn_rope_untruncated": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": {**YARN_ROPE, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "mistral_sliding": ("MistralConfig", {**SIZES, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen2_sliding_upper_layers": (
        "Qwen2Config",
        {**SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen3_biases_linear_rope": (
        "Qwen3Config",
        {
            **SIZES,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        },
    ),
    "gemma3_text": ("Gemma3TextConfig", GEMMA),
    "gemma3_text_biases_untied": (
        "Gemma3TextConfig",
        {**GEMMA, "num_hidden_layers": 2, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma3_text_scaled_rope": (
        "Gemma3TextConfig",
        {**GEMMA, "num_hidden_layers": 2, "sliding_window_pattern": 2, "rope_parameters": SCALED_GEMMA_ROPE},
    ),
    # The published model with vision forgets the soft cap of its text part.
    "gemma3_with_vision": (
        "Gemma3Config",
        {"text_config": {**GEMMA, "final_logit_softcapping": None}, "vision_config": VISION},
    ),
}
CHUNKS = (1, 3, 7, 16)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=generator).tolist()


def expected_logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


def assert_close(ours, expected, relative=1e-4):
    assert ours.shape == expected.shape
    error = (ours - expected).abs().max() / expected.abs().max()
    assert error <= relative  # false for NaN too


@pytest.fixture(scope="module", params=MODELS)
def case(request, published_model, load_decoder, tmp_path_factory):
    """The published model and our decoder of the same files."""
    model = published_model(*MODELS[request.param])
    folder: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, load_decoder(folder)


@pytest.mark.parametrize("chunk", [40, *CHUNKS])
def test_logits_of_all_positions_agree_whole_and_in_chunks(case, paged_model, chunk):
    """E-08, E-12, F-17: positions count from the sequence's start; head_dim is its own number."""
    model, decoder = case
    tokens = random_tokens(40, seed=1)
    assert_close(paged_model(decoder).prefill("a", tokens, chunk), expected_logits(model, tokens))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_decode_and_prefill_share_a_step_without_seeing_each_other(case, paged_model, chunk):
    """E-12: one sequence decodes while another is prefilled in chunks; each has the logits it has alone."""
    model, decoder = case
    decoding, prefilled = random_tokens(45, seed=2), random_tokens(33, seed=3)
    paged = paged_model(decoder)
    parts = {"decoding": [paged.prefill("decoding", decoding[:11], 11)], "prefilled": []}
    for start in range(0, len(prefilled), chunk):
        decoded = 11 + start // chunk
        step = paged.step(
            {"decoding": decoding[decoded : decoded + 1], "prefilled": prefilled[start : start + chunk]}
        )
        for name, logits in step.items():
            parts[name].append(logits)
    for name, tokens in (("decoding", decoding), ("prefilled", prefilled)):
        ours = torch.cat(parts[name])
        assert_close(ours, expected_logits(model, tokens)[: len(ours)])


@pytest.mark.parametrize("chunk", [1, 31, 32, 33, 64, 128])
@pytest.mark.parametrize(
    ("config_class", "arguments"),
    [
        ("Gemma3TextConfig", {**GEMMA, "sliding_window": 32}),
        ("MistralConfig", {**SIZES, "sliding_window": 32}),
    ],
)
def test_chunks_longer_than_the_window_lose_no_key(
    config_class, arguments, chunk, published_model, load_decoder, paged_model, tmp_path
):
    """E-01: a row at q sees q - window + 1 .. q, whichever chunk those keys came in."""
    model = published_model(config_class, arguments)
    model.save_pretrained(tmp_path)
    tokens = random_tokens(4 * 32, seed=4)
    ours = paged_model(load_decoder(tmp_path)).prefill("a", tokens, chunk)
    expected = expected_logits(model, tokens)
    assert_close(ours, expected)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("length", [195, 2916])
def test_gemma_with_scaled_global_layers_agrees_on_short_and_long_prompts(
    length, published_model, load_decoder, paged_model, tmp_path
):
    """F-12, F-13: only global layers are scaled, and a long prompt shows it."""
    arguments = MODELS["gemma3_text_scaled_rope"][1]
    model = published_model("Gemma3TextConfig", {**arguments, "sliding_window": 64})
    model.save_pretrained(tmp_path)
    tokens = random_tokens(length, seed=5)
    ours = paged_model(load_decoder(tmp_path), num_tokens=3000).prefill("a", tokens, 512)
    expected = expected_logits(model, tokens)
    assert_close(ours, expected)
    assert torch.equal(ours[-1].topk(5).indices, expected[-1].topk(5).indices)


@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
def test_a_head_of_its_own_is_used_whatever_flags_at_either_level_of_the_config_say(
    inner, outer, published_model, load_decoder, paged_model, tmp_path
):
    """F-08: a model with vision whose files hold a trained head; ten prompts."""
    text = {**GEMMA, "num_hidden_layers": 2, "final_logit_softcapping": None}
    untied = {"text_config": {**text, "tie_word_embeddings": False}, "tie_word_embeddings": False}
    model = published_model("Gemma3Config", {**untied, "vision_config": VISION})
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for level, flag in ((config, outer), (config["text_config"], inner)):
        level["tie_word_embeddings"] = flag
        if flag is None:
            del level["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    paged = paged_model(load_decoder(tmp_path))
    for seed in range(10):
        tokens = random_tokens(12, seed)
        assert_close(paged.prefill(f"prompt {seed}", tokens, 5), expected_logits(model, tokens))


@pytest.mark.parametrize("scalar", [144, 168])
def test_gemma_scales_scores_by_its_own_scalar_and_not_by_the_head_size(
    scalar, published_model, load_decoder, paged_model, tmp_path
):
    """F-14: heads of 128, as Gemma 3 27B."""
    sizes = {**GEMMA, "head_dim": 128, "num_hidden_layers": 2, "query_pre_attn_scalar": scalar}
    model = published_model("Gemma3TextConfig", sizes)
    model.save_pretrained(tmp_path)
    tokens = random_tokens(40, seed=8)
    ours = paged_model(load_decoder(tmp_path)).prefill("a", tokens, 16)
    assert_close(ours, expected_logits(model, tokens))


@pytest.mark.parametrize("container", ["folder", "gguf"])
def test_a_cap_on_scores_is_obeyed(
    container, published_model, load_decoder, paged_model, tmp_path, monkeypatch
):
    """F-14: the published attention has the cap as an argument; the published model does not pass it on."""
    cap = 1.5
    model = published_model("Gemma3TextConfig", {**GGUF_GEMMA, "attn_logit_softcapping": cap})
    path = tmp_path if container == "folder" else tmp_path / "m.gguf"
    if container == "folder":
        model.save_pretrained(path)
    else:
        write_gguf(path, convert(model).but(metadata={"gemma3.attn_logit_softcapping": cap}))
    tokens = random_tokens(40, seed=13)
    plain = expected_logits(model, tokens)
    monkeypatch.setattr(
        modeling_gemma3,
        "eager_attention_forward",
        partial(modeling_gemma3.eager_attention_forward, softcap=cap),
    )
    expected = expected_logits(model, tokens)
    assert not torch.allclose(plain, expected, rtol=1e-3)
    assert_close(paged_model(load_decoder(path)).prefill("a", tokens, 16), expected)


@pytest.mark.parametrize("length", [96, 192])
@pytest.mark.parametrize("attention", [None, 1.0, 1.3])
@pytest.mark.parametrize("container", ["folder", "gguf"])
@pytest.mark.parametrize("config_class", ["LlamaConfig", "Qwen3Config"])
def test_yarn_agrees_at_one_and_a_half_and_three_times_the_original_length(
    config_class, container, attention, length, published_model, load_decoder, paged_model, tmp_path
):
    """F-21: folder and GGUF alike, with the attention factor that the file states or the one YaRN gives."""
    rope = {**YARN_ROPE, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
    if attention is not None:
        rope["attention_factor"] = attention
    model = published_model(
        config_class,
        {**SIZES, "max_position_embeddings": 64, "num_hidden_layers": 2, "rope_parameters": rope},
    )
    path = tmp_path if container == "folder" else tmp_path / "m.gguf"
    if container == "folder":
        model.save_pretrained(path)
    else:
        write_gguf(path, convert(model))
    decoder = load_decoder(path)
    assert decoder.spec.max_position == 4 * 64
    tokens = random_tokens(length, seed=9)
    assert_close(paged_model(decoder).prefill("a", tokens, 64), expected_logits(model, tokens))


def times(factor, *names):
    """A change of the published model: the parameters whose names end so, multiplied."""

    def change(model):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(names):
                    weight *= factor

    return change


def scaled_scores(scale):
    def change(model):
        for layer in model.model.layers:
            layer.self_attn.scaling = scale

    return change


def capped_logits(cap):
    def change(model):
        model.config.final_logit_softcapping = cap

    return change


INTO_RESIDUAL = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias")
POST_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
UNCAPPED_GEMMA = {**GGUF_GEMMA, "num_hidden_layers": 2, "final_logit_softcapping": None}
BIASES = {**SIZES, "attention_bias": True, "mlp_bias": True}
GGUF_KEYS = {
    "attention.scale": ("LlamaConfig", SIZES, "attention.scale", 0.1, scaled_scores(0.1)),
    "attention.scale of Gemma": ("Gemma3TextConfig", GEMMA, "attention.scale", 0.3, scaled_scores(0.3)),
    "attention.scale of 0 is none": ("LlamaConfig", SIZES, "attention.scale", 0.0, None),
    "logit_scale": ("LlamaConfig", SIZES, "logit_scale", 0.25, times(0.25, "lm_head.weight")),
    "embedding_scale": ("Qwen2Config", SIZES, "embedding_scale", 3.0, times(3.0, "embed_tokens.weight")),
    "residual_scale": ("LlamaConfig", BIASES, "residual_scale", 0.22, times(0.22, *INTO_RESIDUAL)),
    "final_logit_softcapping": (
        "Gemma3TextConfig",
        UNCAPPED_GEMMA,
        "final_logit_softcapping",
        2.0,
        capped_logits(2.0),
    ),
}


@pytest.mark.parametrize("name", GGUF_KEYS)
def test_a_gguf_key_that_changes_the_computation_is_obeyed(
    name, published_model, load_decoder, paged_model, tmp_path
):
    """F-14: the published model is changed in the same way, and the logits of both agree."""
    config_class, arguments, key, value, change = GGUF_KEYS[name]
    model = published_model(config_class, arguments)
    contents = convert(model)
    tokens = random_tokens(40, seed=10)
    plain = expected_logits(model, tokens)
    if change is not None:
        change(model)
    write_gguf(tmp_path / "m.gguf", contents.but(metadata={f"{contents.architecture}.{key}": value}))
    expected = expected_logits(model, tokens)
    ours = paged_model(load_decoder(tmp_path / "m.gguf")).prefill("a", tokens, 16)
    assert_close(ours, expected)
    assert torch.allclose(plain, expected, rtol=1e-3) == (change is None)


def test_a_residual_scale_is_obeyed_behind_gemma_s_norms_too(
    published_model, load_decoder, paged_model, tmp_path
):
    """F-14: the scale applies after the norm. GGUF's gains hold the 1 that Gemma's files leave out."""
    model = published_model("Gemma3TextConfig", GGUF_GEMMA)
    contents = convert(model).but(metadata={"gemma3.residual_scale": 0.5})
    write_gguf(tmp_path / "m.gguf", contents)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(POST_NORMS):
                weight.copy_((1 + weight) * 0.5 - 1)
    tokens = random_tokens(40, seed=11)
    ours = paged_model(load_decoder(tmp_path / "m.gguf")).prefill("a", tokens, 16)
    assert_close(ours, expected_logits(model, tokens))


@pytest.mark.parametrize("period", [None, 2])
def test_a_sliding_window_in_a_gguf_file_is_obeyed_in_every_architecture(
    period, published_model, load_decoder, paged_model, tmp_path
):
    """F-14: in all layers, as in Mistral, or in those that a list names, as in Qwen."""
    layers = SIZES["num_hidden_layers"]
    if period is None:
        model = published_model("MistralConfig", {**SIZES, "sliding_window": 7})
        pattern = {}
    else:
        slides = [(i + 1) % period != 0 for i in range(layers)]
        types = ["sliding_attention" if slide else "full_attention" for slide in slides]
        window = {"use_sliding_window": True, "sliding_window": 7, "layer_types": types}
        model = published_model("Qwen3Config", {**SIZES, **window})
        pattern = {"attention.sliding_window_pattern": slides}
    contents = convert(model)
    keys = {f"{contents.architecture}.{key}": value for key, value in pattern.items()}
    window_key = f"{contents.architecture}.attention.sliding_window"
    write_gguf(tmp_path / "m.gguf", contents.but(metadata={**keys, window_key: 7}))
    tokens = random_tokens(40, seed=12)
    ours = paged_model(load_decoder(tmp_path / "m.gguf")).prefill("a", tokens, 16)
    assert_close(ours, expected_logits(model, tokens))


def generate(paged, prompts, chunk, count):
    """Greedy tokens and their logits of all sequences, each decoding as soon as its prompt is through."""
    left = {name: list(prompt) for name, prompt in prompts.items()}
    logits = {name: [] for name in prompts}
    while any(len(rows) < count for rows in logits.values()):
        step = {name: left[name][:chunk] for name in prompts if len(logits[name]) < count}
        for name, rows in paged.step(step).items():
            del left[name][:chunk]
            if not left[name]:
                logits[name].append(rows[-1])
                left[name] = [int(rows[-1].argmax())]
    stacked = {name: torch.stack(rows) for name, rows in logits.items()}
    return {name: rows.argmax(-1).tolist() for name, rows in stacked.items()}, stacked


def prompts_in_company():
    return {"a": random_tokens(80, seed=6)} | {
        f"other{i}": random_tokens(9 + 20 * i, seed=i) for i in range(3)
    }


@pytest.mark.parametrize("company", [False, True])
def test_greedy_tokens_in_fp32_do_not_depend_on_chunks_or_company(
    company, published_model, load_decoder, paged_model, tmp_path
):
    """E-12: 64 greedy tokens after a prompt of five blocks, against the published model's own."""
    model = published_model(*MODELS["llama"])
    model.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    prompts = prompts_in_company() if company else {"a": prompts_in_company()["a"]}
    known = list(prompts["a"])
    for _ in range(64):
        known.append(int(expected_logits(model, known)[-1].argmax()))
    for chunk in (1, 2, 15, 16, 17, 79, 80, 81):
        tokens, _ = generate(paged_model(decoder, block_size=16), prompts, chunk, 64)
        assert tokens["a"] == known[80:], chunk


def test_greedy_tokens_in_bf16_part_only_where_two_choices_are_close(
    published_model, load_decoder, paged_model, tmp_path
):
    """E-12: bf16 may round another way in another chunk, by no more than 0.2 in logits of size 5."""
    published_model(*MODELS["llama"]).save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path, torch.bfloat16)
    prompts = prompts_in_company()
    tokens, logits = generate(paged_model(decoder, block_size=16), prompts, 80, 64)
    for chunk in (1, 15, 16, 17):
        chunked, _ = generate(paged_model(decoder, block_size=16), prompts, chunk, 64)
        for name in prompts:
            parted = [i for i in range(64) if tokens[name][i] != chunked[name][i]]
            if parted:
                best, second = logits[name][parted[0]].topk(2).values.tolist()
                assert best - second < 0.2
