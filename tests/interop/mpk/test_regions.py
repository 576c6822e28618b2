from __future__ import annotations

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.interop.mpk.graph import MpkTensor
from flywheel.interop.mpk.regions import grid_of, rects_of, runs_of

BF16, INT4 = 941, 925


def addresses(tensor: MpkTensor) -> set[int]:
    """The bytes of a piece, one by one."""
    starts = [tensor.offset]
    for size, step in zip(tensor.dims, tensor.strides, strict=True):
        starts = [start + place * step * tensor.item_bytes for start in starts for place in range(size)]
    return {start + byte for start in starts for byte in range(tensor.item_bytes)}


@st.composite
def pieces(draw: st.DrawFn) -> list[MpkTensor]:
    """Pieces of one tensor of rows of 8 or 16 elements, or of any strides."""
    pitch = draw(st.sampled_from([8, 16]))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, 3))
        offset = 2 * draw(st.integers(0, 40))
        if kind == 0:
            dims, strides = (draw(st.integers(1, 40)),), (1,)
        elif kind == 1:
            dims, strides = (draw(st.integers(1, 4)), draw(st.integers(1, 16))), (pitch, 1)
        elif kind == 2:
            dims, strides = (2, draw(st.integers(1, 3)), draw(st.integers(1, 6))), (3 * pitch, pitch, 1)
        else:
            sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
            dims, strides = tuple(sizes), tuple(draw(st.integers(0, 20)) for _ in sizes)
        found.append(MpkTensor("t", offset, dims, strides, BF16))
    return found


@given(pieces())
@settings(deadline=None, max_examples=examples(400))
def test_pieces_share_a_cell_where_they_share_a_byte(tensors: list[MpkTensor]) -> None:
    grid, _ = grid_of((0, "t"), 0, [(tensor, 1) for tensor in tensors], 1)
    cells = [set(grid.cells(rects_of(tensor, grid.pitch), range(1))) if grid.columns else {0} for tensor in tensors]
    for first, some in zip(tensors, cells, strict=True):
        for second, others in zip(tensors, cells, strict=True):
            if addresses(first) & addresses(second):
                assert some & others


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 8), st.integers(0, 3), st.integers(1, 4), st.integers(1, 8))
@settings(deadline=None)
def test_tiles_of_one_tensor_share_a_cell_only_where_they_share_a_byte(
    a: int, b: int, c: int, d: int, e: int, f: int
) -> None:
    first = MpkTensor("t", 2 * (16 * a + c), (b, 8), (16, 1), BF16)
    second = MpkTensor("t", 2 * (16 * d + f), (e, 8), (16, 1), BF16)
    grid, _ = grid_of((0, "t"), 0, [(first, 1), (second, 1)], 1)
    shared = set(grid.cells(rects_of(first, grid.pitch), range(1))) & set(
        grid.cells(rects_of(second, grid.pitch), range(1))
    )
    assert bool(shared) == bool(addresses(first) & addresses(second))


def test_elements_of_unknown_size_cover_the_whole_tensor() -> None:
    packed, plain = MpkTensor("t", 64, (4,), (1,), INT4), MpkTensor("t", 1000, (4,), (1,), BF16)
    grid, _ = grid_of((0, "t"), 0, [(packed, 1), (plain, 1)], 1)
    assert set(grid.cells(rects_of(plain, grid.pitch), range(1))) <= set(
        grid.cells(rects_of(packed, grid.pitch), range(1))
    )


def test_a_tensor_with_too_many_cuts_is_one_cell() -> None:
    tensors = [MpkTensor("t", 2 * place, (1,), (1,), BF16) for place in range(100)]
    grid, touched = grid_of((0, "t"), 5, [(tensor, 1) for tensor in tensors], 1, most=50)
    assert (grid.size, touched) == (1, 100)
    assert grid.cells(rects_of(tensors[3], grid.pitch), range(7)) == (5,)
    assert grid.rect(5) is None


def test_a_piece_without_elements_covers_nothing() -> None:
    assert runs_of(MpkTensor("t", 8, (3, 0), (4, 1), BF16)) == []


def test_a_tensor_of_more_rectangles_than_can_be_cut_counts_whole() -> None:
    rows = [MpkTensor("t", 2 * place, (1000, 1), (1000 + place % 7, 1), BF16) for place in range(2000)]
    grid, touched = grid_of((0, "t"), 0, [(tensor, 1) for tensor in rows], 1)
    assert (grid.columns, grid.size, touched) == ((), 1, 2000)
    alike = [MpkTensor("t", 2 * place, (1000, 1), (4000, 1), BF16) for place in range(2000)]
    grid, touched = grid_of((0, "t"), 0, [(tensor, 1) for tensor in alike], 1)
    assert (grid.size, touched) == (2000, 2000)
