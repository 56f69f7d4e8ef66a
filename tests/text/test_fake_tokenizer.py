"""The fake tokenizer is what its docstring says."""

from legato.text.fake import FakeTokenizer
from legato.text.origins import Origin, written


def test_the_fake_tokenizer_has_one_token_for_each_byte() -> None:
    tokenizer = FakeTokenizer()
    assert tokenizer.vocab_size == 258
    assert tokenizer.encode("h\u00e9") == [256, 104, 195, 169]
    assert tokenizer.decode([256, 104, 195, 169, 257]) == "h\u00e9"
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (256, 257, {257})
    assert tokenizer.encode_chat(written("<bos>a<eos>", Origin.TEMPLATE)) == [256, 97, 257]
