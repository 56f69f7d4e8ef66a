"""The decoder, its loader and its config reader against Hugging Face transformers on tiny random models.

Every family, whole and in chunks through scattered blocks: the logits of all positions must agree.
"""

from pathlib import Path

import pytest
import torch

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
