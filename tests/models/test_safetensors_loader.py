"""Loading safetensors: single and sharded files, tied heads, and every way in which a folder can be wrong."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.errors import ModelError
from legato.models.config_json import spec_from_folder
from legato.models.load import open_model
from legato.models.safetensors_loader import SafetensorsWeights
from legato.models.source import ModelFiles

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FAMILIES = {
    "llama": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**SIZES, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SIZES, "tie_word_embeddings": True}),
    "gemma3_text": ("Gemma3TextConfig", SIZES),
}
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(folder, dtype=torch.float32):
    return dict(SafetensorsWeights(folder, spec_from_folder(folder), dtype=dtype, device=CPU))


def refusal(folder):
    """The one line with which loading is refused."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in caught.value.message
    return caught.value.message


def edit(path, change):
    """Rewrite one file of tensors after `change` has altered the dictionary."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def single(published_model, tmp_path):
    """A folder with an untied Llama in one file."""
    published_model("LlamaConfig", SIZES).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(published_model, tmp_path):
    """The same in several files with an index."""
    published_model("LlamaConfig", SIZES).save_pretrained(tmp_path, max_shard_size=6_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    return tmp_path


def shard_with(folder, tensor):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_and_single_files_give_the_same_tensors_which_are_all_there(
    family, published_model, tmp_path
):
    """F-07: a tied model without lm_head loads, in every family."""
    model = published_model(*FAMILIES[family])
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size=6_000)
    assert not (tmp_path / "many" / "model.safetensors").exists()
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    shapes = spec_from_folder(tmp_path / "one").tensor_shapes()
    assert {name: tuple(tensor.shape) for name, tensor in one.items()} == shapes
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert "lm_head" not in one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_float_types_convert_and_norm_gains_stay_fp32(stored, dtype, published_model, tmp_path):
    model = published_model("Gemma3TextConfig", SIZES).to(stored)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path, dtype)
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if name.endswith("norm") else dtype), name
    raw = model.state_dict()
    assert torch.equal(weights["layers.1.down"], raw[DOWN].to(dtype))
    # Gemma's files hold gain - 1.
    assert torch.equal(weights["layers.1.q_norm"], raw["model.layers.1.self_attn.q_norm.weight"].float() + 1)


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_with_vision_is_found_in_older_and_newer_layouts(
    layout, published_model, tmp_path
):
    model = published_model("Gemma3TextConfig", SIZES)
    model.save_pretrained(tmp_path)
    expected = load(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))

    def wrap(tensors):
        renamed = {layout + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)
        older = layout == "language_model.model."
        for part in (
            "vision_tower.vision_model.head.weight",
            "multi_modal_projector.mm_soft_emb_norm.weight",
        ):
            tensors[part if older else f"model.{part}"] = torch.zeros(2)

    edit(tmp_path / "model.safetensors", wrap)
    weights = load(tmp_path)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def open_folder(folder):
    return open_model(ModelFiles(name="m", kind="folder", path=folder))


@pytest.mark.parametrize("stored", ["float32", "another type", "other numbers", "one other number"])
@pytest.mark.parametrize("place", ["one file", "many files"])
def test_a_head_in_the_files_is_used_if_it_differs_whatever_the_flag_says(
    stored, place, published_model, tmp_path, caplog
):
    """F-06, F-08: an equal one is the embedding; one that differs in a single number is its own tensor."""
    size = {"max_shard_size": 6_000} if place == "many files" else {}
    published_model(*FAMILIES["llama"]).to(torch.bfloat16).save_pretrained(tmp_path, **size)
    embed = "model.embed_tokens.weight"
    path = tmp_path / "model.safetensors" if place == "one file" else shard_with(tmp_path, embed)
    head = load_file(path)[embed].float()
    if stored == "another type":
        head = head.to(torch.float16)  # bfloat16 of this size fits
        assert torch.equal(head.float(), load_file(path)[embed].float())
    elif stored == "other numbers":
        head = -head
    elif stored == "one other number":
        head[-1, -1] += 2**-8
    if place == "one file":
        edit(path, lambda tensors: tensors.update({"lm_head.weight": head}))
    else:
        index = tmp_path / "model.safetensors.index.json"
        listed = json.loads(index.read_text())
        listed["weight_map"]["lm_head.weight"] = "model-head.safetensors"
        index.write_text(json.dumps(listed))
        save_file({"lm_head.weight": head}, tmp_path / "model-head.safetensors")
    with caplog.at_level(logging.INFO):
        opened = open_folder(tmp_path)
        weights = dict(opened.weights(dtype=torch.float32, device=CPU))
    differs = "other" in stored and "another" not in stored
    assert opened.spec.tie_embeddings == (not differs)
    assert ("lm_head.weight differs from model.embed_tokens.weight, so it is used" in caplog.text) == differs
    assert ("1 tensors that change nothing are ignored, first lm_head.weight" in caplog.text) != differs
    if differs:
        assert torch.equal(weights["lm_head"], head.float())
    else:
        assert "lm_head" not in weights


def test_a_head_of_another_size_is_refused_and_not_ignored(published_model, tmp_path):
    published_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    head = torch.zeros(39, SIZES["hidden_size"])
    edit(tmp_path / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(ModelError, match=r"lm_head.weight has shape \[39, 16\]"):
        open_folder(tmp_path).weights(dtype=torch.float32, device=CPU)


def test_an_untied_model_uses_the_head_in_its_file(single):
    """F-06"""
    assert torch.equal(load(single)["lm_head"], load_file(single / "model.safetensors")["lm_head.weight"])


def test_an_untied_model_without_a_head_is_refused(single):
    """F-07"""
    edit(single / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    message = refusal(single)
    assert "lm_head.weight is missing" in message
    assert "does not tie" in message


def test_the_tensors_are_copies_that_outlive_a_change_of_the_file(single):
    weights = load(single)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    path = single / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:  # the same file, as a careless copy over it would write
        file.write(b"\xff" * size)
    assert all(torch.equal(weights[name], before[name]) for name in weights)


@pytest.mark.parametrize("fate", ["deleted", "renamed"])
def test_missing_shards_are_all_named(fate, sharded):
    """F-04"""
    lost = sorted(sharded.glob("model-*.safetensors"))[1:3]
    for path in lost:
        if fate == "deleted":
            path.unlink()
        else:
            path.rename(path.with_suffix(".safetensors.part"))
    message = refusal(sharded)
    assert str(sharded) in message
    assert all(path.name in message for path in lost)


def test_a_shard_that_the_index_does_not_list_is_ignored_with_a_word(sharded, caplog):
    """F-04"""
    expected = load(sharded)
    save_file({"model.norm.weight": torch.zeros(16)}, sharded / "model-00009-of-00009.safetensors")
    with caplog.at_level(logging.WARNING):
        weights = load(sharded)
    assert torch.equal(weights["final_norm"], expected["final_norm"])
    assert "model-00009-of-00009.safetensors" in caplog.text


def test_a_tensor_in_two_shards_is_refused(sharded):
    home = shard_with(sharded, DOWN)
    other = next(path for path in sorted(sharded.glob("model-*.safetensors")) if path != home)
    edit(other, lambda tensors: tensors.update({DOWN: torch.zeros(16, 24)}))
    message = refusal(sharded)
    assert DOWN in message
    assert home.name in message
    assert other.name in message


def test_a_tensor_that_is_not_in_the_shard_that_the_index_names_is_refused(sharded):
    """F-04"""
    home = shard_with(sharded, DOWN)
    edit(home, lambda tensors: tensors.pop(DOWN))
    message = refusal(sharded)
    assert DOWN in message
    assert str(home) in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "holds a JSON list"),
        (b"{}", "weight_map is missing"),
        (b'{"weight_map": {}}', "weight_map is"),
        (b'{"weight_map": ["a"]}', "weight_map is"),
        (b'{"weight_map": {"a": 3}}', "weight_map gives a the file 3"),
        (b'{"weight_map": {"a": "../../secret.safetensors"}}', "the plain name of a"),
        (b'{"weight_map": {"a": "shard.bin"}}', "the plain name of a"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "the plain name of a"),
    ],
)
def test_a_damaged_index_is_named(content, words, sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_bytes(content)
    message = refusal(sharded)
    assert message.startswith(f"{index}: ")
    assert words in message


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -4000, -1])
def test_a_truncated_file_is_named(kept, sharded):
    path = shard_with(sharded, DOWN)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    message = refusal(sharded)
    assert message.startswith(f"{path}: not a whole safetensors file")


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        (20).to_bytes(8, "little") + b"this is not a header",
        (2**62).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_file_that_is_something_else_is_named(content, single):
    path = single / "model.safetensors"
    path.write_bytes(content)
    assert refusal(single).startswith(f"{path}: not a whole safetensors file")


def test_a_wrong_shape_is_named_with_both_shapes(single):
    path = single / "model.safetensors"
    edit(path, lambda tensors: tensors.update({DOWN: torch.zeros(24, 16)}))
    assert refusal(single) == f"{path}: tensor {DOWN} has shape [24, 16]; the config asks for [16, 24]"


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "model.norm.weight", DOWN])
def test_a_missing_tensor_is_named(tensor, single):
    edit(single / "model.safetensors", lambda tensors: tensors.pop(tensor))
    message = refusal(single)
    assert f"tensor {tensor} is missing" in message
    assert str(single) in message


@pytest.mark.parametrize(
    "tensor", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "vision_tower.x"]
)
def test_an_unknown_tensor_is_named(tensor, single):
    path = single / "model.safetensors"
    edit(path, lambda tensors: tensors.update({tensor: torch.zeros(4), "zzz": torch.zeros(1)}))
    assert refusal(single) == f"{path}: tensor {tensor} is no part of a llama model"


def test_stored_rotary_frequencies_are_ignored_with_a_word(single, caplog):
    edit(
        single / "model.safetensors",
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    with caplog.at_level(logging.INFO):
        assert load(single).keys() == spec_from_folder(single).tensor_shapes().keys()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert f"1 tensors that change nothing are ignored, first {name}" in caplog.text


def test_all_is_checked_by_the_headers_and_each_tensor_is_read_when_it_is_asked_for(sharded):
    spec = spec_from_folder(sharded)
    weights = SafetensorsWeights(sharded, spec, dtype=torch.float32, device=CPU)
    assert set(weights) == spec.tensor_shapes().keys()
    embedding = weights.pop("embed")
    assert embedding.shape == (40, 16)
    assert "embed" not in weights
    assert len(weights) == len(spec.tensor_shapes()) - 1
    home = shard_with(sharded, DOWN)
    home.unlink()
    with pytest.raises(ModelError) as caught:
        weights.pop("layers.1.down")
    assert caught.value.message.startswith(f"{home}: not a whole safetensors file")


def test_a_number_that_does_not_fit_in_the_type_asked_for_is_refused(single):
    path = single / "model.safetensors"
    edit(path, lambda tensors: tensors[DOWN].fill_(70_000.0))
    assert load(single)["layers.1.down"].max() == 70_000
    with pytest.raises(
        ModelError, match=f"^{path}: tensor {DOWN} holds numbers that are not finite as float16"
    ):
        load(single, torch.float16)


@pytest.mark.parametrize(
    ("tensor", "dtype", "code"),
    [
        ("model.layers.0.mlp.up_proj.qweight", torch.int32, "I32"),
        ("model.layers.0.mlp.up_proj.weight", torch.int8, "I8"),
        ("model.layers.0.mlp.up_proj.weight", torch.uint8, "U8"),
        ("model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn, "F8_E4M3"),
        ("model.layers.0.mlp.up_proj.weight", torch.float64, "F64"),
    ],
)
def test_a_type_that_is_no_plain_float_is_refused_by_name(tensor, dtype, code, single):
    path = single / "model.safetensors"
    edit(path, lambda tensors: tensors.update({tensor: torch.zeros(24, 16).to(dtype)}))
    message = refusal(single)
    assert message.startswith(f"{path}: tensor {tensor} has type {code}")
    assert "F16, BF16, F32" in message


def test_a_folder_without_weights_is_refused(single):
    spec = spec_from_folder(single)
    empty = single / "empty"
    empty.mkdir()
    for folder in (empty, single / "absent", single / "config.json"):
        with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
            SafetensorsWeights(folder, spec, dtype=torch.float32, device=CPU)
