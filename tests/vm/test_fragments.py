from __future__ import annotations

import numpy as np
import numpy.typing as npt
from fragments import fragment_index, from_fragments, to_fragments
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 70))


@given(SIZES)
def test_fragments_come_back_as_the_matrix(size: tuple[int, int]) -> None:
    matrix = np.arange(1, size[0] * size[1] + 1, dtype=np.int32).reshape(size)
    flat = to_fragments(matrix)
    assert np.array_equal(from_fragments(flat, *size), matrix)
    assert len(flat) == -(-size[0] // 16) * -(-size[1] // 16) * 256
    assert np.count_nonzero(flat) == matrix.size


@given(SIZES)
def test_every_element_is_found_by_its_index(size: tuple[int, int]) -> None:
    matrix = np.arange(size[0] * size[1]).reshape(size)
    flat = to_fragments(matrix)
    for (row, column), value in np.ndenumerate(matrix):
        assert flat[fragment_index(row, column, size[1])] == value


def test_a_lane_holds_four_columns_of_two_rows() -> None:
    matrix = np.array([[(row, column) for column in range(32)] for row in range(16)], dtype="i,i").reshape(16, 32)
    lanes = to_fragments(matrix).reshape(2, 32, 8)
    for g in range(8):
        for t in range(4):
            c, h = 16 + 4 * t, g + 8
            wanted = [(g, c), (g, c + 1), (h, c), (h, c + 1), (g, c + 2), (g, c + 3), (h, c + 2), (h, c + 3)]
            assert lanes[1, 4 * g + t].tolist() == wanted


def mma(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What the lanes get [32, 4] of a fragment [32, 8] and its operand [32, 4], by the instruction's own layout."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(8):
            left[g + i // 2 % 2 * 8, 2 * t + i // 4 * 8 + i % 2] = a[lane, i]
        right[[2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9], g] = b[lane]
    product = left @ right
    return np.array([[product[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] for i in range(4)] for lane in range(32)])


def test_four_fragments_share_a_load_of_one_row_of_x() -> None:
    """As product.cuh does: lane 4g + t has columns 4t.. of fragment g % 4, and accumulator c counts in column c."""
    random = np.random.default_rng(0)
    matrix, x = random.standard_normal((16, 128)), random.standard_normal(128)
    fragments = to_fragments(matrix).reshape(8, 32, 8)
    acc = np.zeros((4, 32, 4))
    for first in (0, 4):
        shared = np.array([x[(first + lane // 4 % 4) * 16 + lane % 4 * 4 :][:4] for lane in range(32)])
        for c in range(4):
            acc[c] += mma(fragments[first + c], shared)
    halves = np.zeros(32)
    for lane in range(32):
        low, c = lane % 4 // 2 * 2, lane % 2 * 2
        halves[lane] = acc[c][lane][low] + acc[c + 1][lane][low + 1]
    rows = [halves[4 * (row % 8) + row // 8 * 2 :][:2].sum() for row in range(16)]
    assert np.allclose(rows, matrix @ x)
