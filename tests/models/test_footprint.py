from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from flywheel.errors import TooLargeError
from flywheel.ir import TARGETS, BufferKind, DType
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.footprint import check_fits, footprint
from flywheel.models.spec import DecoderSpec
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, make_workload

TIED = replace(CATALOG["smollm2-135m"], n_layers=3)
UNTIED = replace(CATALOG["llama3-8b"], n_layers=2, vocab=512)


@pytest.mark.parametrize("spec", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("batch", [1, 4])
def test_weights_and_caches_are_those_of_a_program_and_the_workspace_no_less(
    spec: DecoderSpec, batch: int
) -> None:
    work = Workload("small", spec, TARGETS["h100"], "bf16", 300, batch)
    space = make_space(work)
    program = lower(work.graph, space.to_config(space.known_good()[0]), work.target)
    sizes: Counter[BufferKind] = Counter()
    for buffer in {buffer.source or buffer.name: buffer for buffer in program.buffers}.values():
        sizes[buffer.kind] += buffer.nbytes
    found = footprint(work.graph)
    assert found.weight_bytes == sizes.pop(BufferKind.WEIGHT)
    assert found.cache_bytes == sizes.pop(BufferKind.KV_CACHE)
    assert found.workspace_bytes >= sum(sizes.values())
    assert found.nbytes == found.weight_bytes + found.cache_bytes + found.workspace_bytes


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(TooLargeError) as caught:
        make_workload("llama3-70b", "h100", "bf16", 512)
    assert str(caught.value) == (
        "llama3-70b on h100: 141.11 GB of weights, 0.17 of caches and 0.03 of workspace exceed its 85.90 GB of memory"
    )
    assert make_workload("llama3-70b", "h100", "bf16", 512, any_size=True).graph.n_layers == 80
    assert make_workload("llama3-70b", "h200", "bf16", 512).target == TARGETS["h200"]


def test_caches_count_for_every_sequence_and_position() -> None:
    spec = CATALOG["llama3-8b"]
    card = replace(TARGETS["l4"], hbm_bytes=18 * 10**9)
    check_fits(decode_step(spec, 8192, DType.BF16, 1), card)
    with pytest.raises(TooLargeError, match=r"16\.06 GB of weights, 8\.59 of caches"):
        check_fits(decode_step(spec, 8192, DType.BF16, 8), card)
