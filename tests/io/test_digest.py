"""Digests of parameters: any change shows, the way they are cut for reading does not matter."""

import ml_dtypes
import numpy as np

from polyjax.io.digest import ParamsDigest

LARGE = 3 * 8192 * 2 + 5  # float32 values: whole chunks of 64 KiB and a rest


def digest(*params: tuple[str, np.ndarray]) -> str:
    made = ParamsDigest()
    for name, array in params:
        made.add(name, array)
    return made.hexdigest


def test_equal_values_have_equal_digests() -> None:
    values = np.arange(LARGE, dtype=np.float32)
    assert digest(("a", values)) == digest(("a", values.copy()))
    assert len(digest(("a", values))) == 16


def test_any_change_shows() -> None:
    values = np.arange(LARGE, dtype=np.float32)
    known = {digest(("a", values)), digest(("b", values)), digest()}
    for index in (0, 1, 8192 * 2, LARGE - 1):
        changed = values.copy()
        changed[index] = np.nextafter(changed[index], np.float32(np.inf))
        known.add(digest(("a", changed)))
    swapped = values.copy()
    swapped[[0, 8192 * 4]] = swapped[[8192 * 4, 0]]
    known.add(digest(("a", swapped)))
    known.add(digest(("a", values.reshape(1, -1))))
    known.add(digest(("a", values.view(np.int32))))
    one, two = ("a", values), ("b", values[:7])
    known |= {digest(one, two), digest(two, one)}
    assert len(known) == 12


def test_shapes_and_dtypes_of_every_kind() -> None:
    arrays = [
        np.zeros((), np.float32),
        np.zeros((0, 4), np.float32),
        np.ones(3, ml_dtypes.bfloat16),
        np.ones((8192 * 8, 2), ml_dtypes.float8_e4m3fn),
    ]
    assert len({digest(("a", array)) for array in arrays}) == len(arrays)
