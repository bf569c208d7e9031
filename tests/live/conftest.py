"""The demo model, loaded once."""

import pytest

import attnmech as am


@pytest.fixture(scope="module")
def demo() -> am.HookedModel:
    return am.load()
