"""One set of compiled grammars for all tests of this room."""

import pytest

from legato.text.fake import FakeTokenizer
from legato.text.grammar import Grammars


@pytest.fixture(scope="session")
def grammars() -> Grammars:
    """Over the fake vocabulary."""
    return Grammars(FakeTokenizer(), 258)
