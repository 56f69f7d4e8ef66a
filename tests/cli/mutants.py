"""The faults that the tests of cli must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "a message of the log as it came",
        "legato/cli/logs.py",
        "return _escaped(super().formatMessage(record))",
        "return super().formatMessage(record)",
        "tests/cli/test_logs.py::test_j_13_a_line_of_text_holds_one_record_and_nothing_unprintable",
    ),
)
