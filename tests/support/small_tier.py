"""Pages of 16 KiB in and out of an SSD tier, compared byte by byte on the way."""

import numpy as np

from tierkv.storage.aligned import aligned_empty
from tierkv.storage.ssd import ReadStatus, WriteStatus
from tierkv.storage.testing import TEST_NAMESPACE, make_page, page_bytes, page_key

SIZE = 16 << 10
SLOT = SIZE + 4096
HIT, MISS, CORRUPT, ERROR = (
    ReadStatus.HIT,
    ReadStatus.MISS,
    ReadStatus.CORRUPT,
    ReadStatus.ERROR,
)
WRITTEN, FAILED, NO_SPACE = WriteStatus.WRITTEN, WriteStatus.FAILED, WriteStatus.NO_SPACE


def put(tier, *numbers, **kwargs):
    """Write pages by number; return their statuses."""
    return tier.put([make_page(n, SIZE, **kwargs) for n in numbers]).wait(20)


def read(tier, *numbers, version=0):
    """Return the statuses, having compared every hit's bytes."""
    outs = [aligned_empty(SIZE) for _ in numbers]
    statuses = tier.read([page_key(n) for n in numbers], outs, namespace=TEST_NAMESPACE)
    for number, out, status in zip(numbers, outs, statuses, strict=True):
        if status is HIT:
            assert np.array_equal(out, page_bytes(number, SIZE, version))
    return statuses
