"""The faults that the tests of kernels must find: (name, file, text, replacement, test). See scripts/mutants.py."""

MUTANTS = (
    (
        "a scale of weights rounded to nearest, which the largest weight may not fit under",
        "legato/kernels/product_vector.py",
        "scale = next_up.select(is_small, scale)",
        "scale = scale.select(is_small, scale)",
        "tests/kernels/test_integer_products.py::test_a_product_has_the_bits_of_the_oracle",
    ),
    (
        "a row takes the scale of another row of its tile",
        "legato/kernels/product_vector.py",
        "scale = (scales + 4 * row).load(FLOAT).splat()",
        "scale = (scales + 4 * (rows - 1 - row)).load(FLOAT).splat()",
        "tests/kernels/test_integer_products.py::test_a_product_has_the_bits_of_the_oracle",
    ),
    (
        "gated results are added as if there were one for each output",
        "legato/kernels/product.py",
        "width = c.matrix.num_outputs // (2 if args.gate else 1)",
        "width = c.matrix.num_outputs",
        "tests/kernels/test_rows_stand_alone.py::test_nothing_is_written_beyond_the_matrix_its_rows_and_their_memory",
    ),
)
