"""Every case of the collection has a test that carries its id, or a reason in docs/cases.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The ids of the reference collection "Cases from public bug reports of LLM servers", which is kept outside of this
# repository (shared/reference/cases.md); a letter is a kind of trouble, and numbers have gaps.
CASES = """
A-01 A-02 A-04 A-07 A-08 A-09 A-10 A-12 A-13 A-15 A-17 A-19 A-20 A-22
B-01 B-03 B-05 B-06 B-07 B-08 B-10 B-11 B-12 B-14 B-15 B-17 B-18 B-19 B-21 B-23 B-25 B-26
C-01 C-02 C-04 C-05 C-06 C-07 C-10 C-12 C-14 C-15 C-17 C-18
D-01 D-02 D-04 D-05 D-07 D-09 D-10 D-12 D-14 D-15 D-16 D-18 D-19
E-01 E-03 E-05 E-07 E-08 E-11 E-12 E-13 E-14 E-15
F-01 F-02 F-04 F-06 F-07 F-09 F-10 F-12 F-13 F-15 F-16 F-17 F-18 F-19 F-22
G-01 G-02 G-04 G-05 G-07 G-10 G-11 G-12
H-01 H-02 H-04 H-05 H-07 H-09 H-10
I-01 I-02 I-04 I-06 I-08
J-01 J-03 J-04 J-05 J-07 J-09 J-11 J-13
""".split()

ID = re.compile(r"(?<![A-Za-z0-9])(?:[A-J]-\d\d|(?<=test_)[a-j]_\d\d)(?![A-Za-z0-9])")
