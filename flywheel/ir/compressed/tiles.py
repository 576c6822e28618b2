"""The fields that each task of a run has for itself, except its SM. Adjacent tiles of one width are stored as a
stretch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload


class Tile(NamedTuple):
    """The params of one task, and the bytes that it streams and the operations that it does."""

    params: Mapping[str, Any]
    est_bytes: int
    est_flops: int


class Stretch(NamedTuple):
    """`n_tiles` tiles, each `N_tile` columns after the one before.

    `params` are the first tile's. Bytes and flops are those of each tile.
    """

    params: Mapping[str, Any]
    est_bytes: int
    est_flops: int
    n_tiles: int

    def tile(self, place: int) -> Tile:
        """One of the tiles."""
        params = self.params
        if place:
            params = {**params, "n_off": params["n_off"] + place * params["N_tile"]}
        return Tile(params, self.est_bytes, self.est_flops)


class Tiles(Sequence[Tile]):
    """Tiles stored as stretches. As a sequence it has the tiles, which are made on demand."""

    __slots__ = ("_size", "_tiles", "stretches")

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        """Raises ValueError for anything but a Stretch, and for a stretch of several tiles that names no columns."""
        self.stretches = tuple(stretches)
        for each in self.stretches:
            if type(each) is not Stretch or type(each.n_tiles) is not int or each.n_tiles < 1:
                raise ValueError(f"{each!r:.80} is no stretch of tiles")
            if each.n_tiles > 1 and not (type(each.params) is dict and _names_columns(each.params)):
                raise ValueError(f"{each!r:.80}: {each.n_tiles} tiles without n_off and N_tile")
        self._size = sum([each.n_tiles for each in self.stretches])
        self._tiles: tuple[Tile, ...] | None = None

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> Tile: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Tile, ...]: ...

    def __getitem__(self, place: int | slice) -> Tile | tuple[Tile, ...]:
        if place == 0 and self.stretches:
            return self.stretches[0].tile(0)
        return self._all()[place]

    def __iter__(self) -> Iterator[Tile]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        """Whether the other sequence has equal tiles."""
        if isinstance(other, Tiles) and self.stretches == other.stretches:
            return True
        return isinstance(other, Tiles | tuple) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # params are dicts

    def __reduce__(self) -> tuple[type[Tiles], tuple[tuple[Stretch, ...]]]:
        return Tiles, (self.stretches,)

    def _all(self) -> tuple[Tile, ...]:
        if self._tiles is None:
            self._tiles = tuple([each.tile(place) for each in self.stretches for place in range(each.n_tiles)])
        return self._tiles


def tiles_of(tiles: Iterable[Tile]) -> Tiles:
    """Some tiles, each as a stretch of its own."""
    return Tiles([Stretch(*tile, 1) for tile in tiles])


def _names_columns(params: Mapping[str, Any]) -> bool:
    return type(params.get("n_off")) is int and type(params.get("N_tile")) is int
