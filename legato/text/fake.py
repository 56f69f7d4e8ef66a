"""A tokenizer that can be computed by hand, for tests and dry runs without a model."""

from legato.text.gguf_vocab import vocabulary_from_gguf
from legato.text.tokenizer import Tokenizer
from legato.text.vocabulary import byte_alphabet


class FakeTokenizer(Tokenizer):
    """One token for each UTF-8 byte: ids 0..255 are the bytes, 256 is BOS `<bos>`, 257 is EOS `<eos>`.

    encode("hé") is [256, 104, 195, 169]; decode of it is "hé"; 258 ids in all, and as many more without any
    text as `num_ids` asks for: what stands in for a model takes that model's ids.
    """

    BOS, EOS = 256, 257

    def __init__(self, num_ids: int = 0) -> None:
        super().__init__(
            vocabulary_from_gguf(
                {
                    "tokenizer.ggml.model": "gpt2",
                    "tokenizer.ggml.pre": "gpt-2",
                    "tokenizer.ggml.tokens": [*byte_alphabet(), "<bos>", "<eos>"],
                    "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
                    "tokenizer.ggml.merges": [],
                    "tokenizer.ggml.bos_token_id": self.BOS,
                    "tokenizer.ggml.eos_token_id": self.EOS,
                    "tokenizer.ggml.add_bos_token": True,
                },
                num_ids,
            )
        )
