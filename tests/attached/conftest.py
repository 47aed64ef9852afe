import pytest


@pytest.fixture
def benches():
    """Close every bench of a test, whatever happened; check it first."""
    opened = []
    yield opened
    for bench in opened:
        bench.close()
