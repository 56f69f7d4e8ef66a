"""A whole model folder in miniature: shards and their index, configs, tokenizer, chat template."""

import json
from pathlib import Path

import tokenizers
from tiny_gguf import SIZES
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel

from legato.text.vocabulary import byte_alphabet

SPECIAL = ("<s>", "</s>", "<|turn|>")
TEXTS = [*byte_alphabet(), *SPECIAL, "ab"]
BOS, EOS, TURN = 256, 257, 258
SMALL = SIZES | {
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 24,
    "head_dim": 8,
    "eos_token_id": EOS,
}


def write_folder(folder: Path, model: PreTrainedModel) -> Path:
    """The model with a tokenizer over bytes, BOS before each text, and an EOS list of EOS and TURN that only
    generation_config.json has in full."""
    model.save_pretrained(folder, max_shard_size=16_000)
    encoder = tokenizers.Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(TEXTS)}, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(list(SPECIAL))
    encoder.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    encoder.save(str(folder / "tokenizer.json"))
    beside = {
        "generation_config": {"eos_token_id": [EOS, TURN], "temperature": 0.5, "top_k": 3},
        "tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        "special_tokens_map": {"bos_token": "<s>"},
        "chat_template": {
            "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}"
        },
    }
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
