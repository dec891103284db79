"""What a post is made of."""

import numpy as np

from kvxfer.fabric.port import Descriptors


def test_descriptors_count_their_bytes():
    pieces = np.array([[4096, 10], [8192, 1 << 40]], dtype=np.int64)
    assert Descriptors("DRAM", 0, pieces).nbytes == 10 + (1 << 40)
