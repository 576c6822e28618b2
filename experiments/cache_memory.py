"""Memory that KV caches take in granules of 2 MiB, by used positions, beside the bytes that they need.

    python experiments/cache_memory.py > results/cache_memory.txt

The script needs no GPU: it counts granules and makes none.
"""

from __future__ import annotations

from itertools import count
from typing import Final

from flywheel.decode.growing import GrowingMemory
from flywheel.models.catalog import resolve_model

GRANULE_BYTES: Final = 2**21
POSITIONS: Final = (1, 1024, 4096, 8192, 16384, 32768, 131072)
CASES: Final = (
    ("llama3.2-1b", 4096), ("llama3.2-1b", 32768), ("llama3.2-1b", 131072),
    ("llama3.1-8b", 4096), ("llama3.1-8b", 32768), ("llama3.1-8b", 131072),
)  # fmt: skip


class Counted:
    """Granules that nobody makes."""

    nbytes, spared_bytes = GRANULE_BYTES, 0

    def __init__(self) -> None:
        self._numbers = count()

    def reserve(self, count: int) -> int:
        return 0

    def release(self, address: int, count: int) -> None:
        pass

    def create(self) -> int:
        return next(self._numbers)

    def destroy(self, granule: int) -> None:
        pass

    def map(self, address: int, granule: int) -> None:
        pass

    def unmap(self, address: int) -> None:
        pass

    def free_bytes(self) -> int:
        return 2**50


def main() -> None:
    """A line for each model, context and number of positions."""
    print("MiB of one sequence in bf16; held: granules of 2 MiB; needed: rows of its positions; whole: of the context")
    print(f"{'model':<12} {'context':>8} {'positions':>10} {'held':>8} {'needed':>8} {'whole':>8}")
    for name, context in CASES:
        spec = resolve_model(name)
        layers = [spec.of_layer(layer) for layer in range(spec.n_layers)]
        streams = [2 * own.head_dim for own in layers for _ in range(2 * own.n_kv_heads)]
        for positions in (each for each in POSITIONS if each <= context):
            memory = GrowingMemory(Counted(), 1, streams, context)
            memory.hold(0, positions)
            sizes = (memory.held_bytes, sum(streams) * positions, sum(streams) * context)
            mib = [f"{size / 2**20:8,.0f}" for size in sizes]
            print(f"{name:<12} {context:>8} {positions:>10} {' '.join(mib)}")


if __name__ == "__main__":
    main()
