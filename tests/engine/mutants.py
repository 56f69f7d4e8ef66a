"""The faults that the tests of engine must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "an id is free as soon as its client has left",
        "legato/engine/async_engine.py",
        "self._aborting.add(request_id)",
        "pass",
        "tests/engine/test_async_engine.py::test_an_id_is_in_use_until_the_engine_has_ended_what_had_it",
    ),
    (
        "the first step counts against the time to calibrate",
        "legato/engine/calibration.py",
        "began = clock()\n    for number in range(1",
        "began = 0.0\n    for number in range(1",
        "tests/engine/test_target.py::test_a_first_step_that_sets_much_up_leaves_time_to_calibrate",
    ),
    (
        "a calibration times the model alone",
        "legato/engine/calibration.py",
        "seconds = clock() - started + overhead",
        "seconds = clock() - started",
        "tests/engine/test_calibration.py::test_what_the_engine_takes_between_two_steps_is_part_of_a_step",
    ),
    (
        "a calibration believes a step that was held up",
        "legato/engine/calibration.py",
        "if s[1] <= OUTLIER_RATIO * model.cost.seconds(s[0])",
        "if s[1] > 0",
        "tests/engine/test_calibration.py::test_steps_that_were_held_up_are_left_out",
    ),
    (
        "a fake runner that reads only the last block",
        "legato/engine/fake.py",
        "total = sum(map(self._totals.__getitem__, seq.block_table[:num_full]))",
        "total = 0",
        "tests/engine/test_fake_runner.py::test_a_wrong_block_anywhere_in_the_table_changes_the_answer",
    ),
    (
        "the automatic target leaves prompts no share",
        "legato/engine/scheduling.py",
        "min(max(COMFORTABLE_GAP, decodes / (1 - MIN_PREFILL_SHARE)), decodes / (1 - MAX_PREFILL_SHARE))",
        "COMFORTABLE_GAP",
        "tests/engine/test_target.py::test_the_automatic_target_is_comfortable_or_leaves_prompts_their_share",
    ),
    (
        "what ended with a Ctrl-C in the last step is never told",
        "legato/engine/engine.py",
        "return bool(self._pending_events) or self.scheduler.state.has_work",
        "return self.scheduler.state.has_work",
        "tests/engine/test_engine_step.py::test_ctrl_c_in_the_last_step_leaves_its_events_for_one_more_call",
    ),
    (
        "an observer that fails is told on and on",
        "legato/engine/engine.py",
        "self._observers.remove(observer)",
        "pass",
        "tests/engine/test_engine_step.py::test_an_observer_that_fails_is_told_nothing_more_and_requests_are_served",
    ),
)
