"""Text to token ids and back: tokenizers, incremental decoding, stop strings and chat templates."""
