"""Real data small enough to ship: the digits that the examples, the demo and the tests train on (see LICENSE.txt)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

DIGITS: Final = Path(__file__).with_name("digits.npz")
"""numpy archive: images uint8 (1797, 8, 8) of 0..16, labels uint8 (1797,) of 0..9"""


def digits() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return (images, labels): images as float32 (1797, 1, 8, 8) between 0 and 1, labels as int64."""
    with np.load(DIGITS) as archive:
        images = archive["images"][:, None].astype(np.float32) / np.float32(16)
        labels = archive["labels"].astype(np.int64)
    return images, labels
