"""A GGUF file -> a folder in Hugging Face form with the same weights, for peers that read no GGUF.

    python -m benchmarks.hf_folder model.gguf folder

Weights go through transformers' own reader of GGUF, dequantized to float32; the tokenizer is the one that
Legato makes of the file, since transformers' conversion of the demo model's gives other ids. Needs
`transformers` and `accelerate`. Knows Gemma's kind of vocabulary only.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM

from legato.models.gguf_file import GgufFile
from legato.text.gguf_vocab import vocabulary_from_gguf
from legato.text.vocabulary import WORD_MARK


def write_weights(gguf: Path, folder: Path) -> None:
    """By way of a second model: one that was read from GGUF counts as quantized and refuses to be saved."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del read.config.quantization_config
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)


def write_tokenizer(gguf: Path, folder: Path) -> None:
    vocabulary = vocabulary_from_gguf(GgufFile(gguf).metadata)
    tokenizer = vocabulary.parsing
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    special = {name: vocabulary.texts[id] for name, id in names.items() if id is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="GGUF file -> Hugging Face folder, float32.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write_weights(options.gguf, options.folder)
    write_tokenizer(options.gguf, options.folder)


if __name__ == "__main__":
    main()
