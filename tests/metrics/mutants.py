"""The faults that the tests of metrics must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "a mean gap is compared with the target",
        "legato/metrics/timeline.py",
        "sum(map(self.is_late, range(1, self.num_generated))) <= LATE_GAPS * num_gaps",
        "(self.tpot or 0) <= self.targets.tpot",
        "tests/metrics/test_targets.py::test_one_gap_in_a_hundred_may_be_late",
    ),
    (
        "the log tells of every change",
        "legato/metrics/target_log.py",
        "record.ended - self._told < QUIET_S",
        "record.ended < self._told",
        "tests/metrics/test_targets.py::test_a_target_that_comes_and_goes_is_logged_at_most_once_a_minute",
    ),
)
