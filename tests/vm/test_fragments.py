from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flywheel.vm.fragments import fragment_index, from_fragments, to_fragments

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
