"""The faults that the tests of workload must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "all prompts of a workload share their beginning",
        "legato/workload/arrival.py",
        "shake_128(part.name.encode())",
        "shake_128(b'')",
        "tests/workload/test_arrivals.py::test_prompts_share_exactly_the_parts_that_they_have_in_common",
    ),
)
