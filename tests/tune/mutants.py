"""The faults that the tests of tune must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "a front with points that are beaten",
        "legato/tune/frontier.py",
        "points[i][1] < points[front[-1]][1]",
        "points[i][1] <= points[front[-1]][1]",
        "tests/tune/test_frontier.py::test_the_front_is_what_nothing_beats",
    ),
    (
        "a knee on plain axes",
        "legato/tune/frontier.py",
        "(math.log(x), math.log(y)) for x, y in points",
        "(x, y) for x, y in points",
        "tests/tune/test_frontier.py::test_the_knee_is_the_farthest_below_the_chord_in_any_units",
    ),
    (
        "the fastest setup is the best, whatever it misses",
        "legato/tune/search.py",
        "if trial.good >= enough)",
        "if trial.good >= enough - 1)",
        "tests/tune/test_search.py::test_the_best_is_the_fastest_of_those_that_are_as_good",
    ),
    (
        "another target than the one that was asked for may be chosen",
        "legato/tune/search.py",
        "if setup not in space.drawn]",
        "]",
        "tests/tune/test_search.py::test_other_targets_are_drawn_and_never_chosen",
    ),
    (
        "a search without end",
        "legato/tune/search.py",
        "if trials and num_steps >= max_steps:",
        "if trials and num_steps < 0:",
        "tests/tune/test_search.py::test_a_search_ends_when_its_steps_are_used_up",
    ),
    (
        "a capacity that was never met",
        "legato/tune/capacity.py",
        "(middle, high) if meets(middle) else (low, middle)",
        "(middle, high) if not meets(middle) else (low, middle)",
        "tests/tune/test_capacity.py::test_the_limit_is_found_to_within_its_tolerance_and_grows_with_what_is_allowed",
    ),
)
