"""The faults that the tests of text must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "a matcher that believes its tokens are always continued",
        "legato/text/grammar.py",
        "if generated[: len(self._consumed)] != self._consumed:",
        "if len(generated) < len(self._consumed):",
        "tests/text/test_grammar.py::TestMatcher::test_a_mask_is_a_function_of_the_tokens_alone",
    ),
    (
        "replies of a request that share one matcher",
        "legato/text/grammar.py",
        "self._matcher = beginning.deep_copy()",
        "self._matcher = beginning",
        "tests/text/test_grammar.py::TestMatcher::test_replies_of_one_request_do_not_disturb_each_other",
    ),
    (
        "special tokens taken for the text of their names",
        "legato/text/grammar.py",
        "self.special_token_ids = sorted(id for id in vocabulary.special if id < vocab_size)",
        "self.special_token_ids = [eos_id]",
        "tests/text/test_grammar.py::TestTokens::test_a_json_string_holds_no_special_token_and_every_way_to_spell_text",
    ),
)
