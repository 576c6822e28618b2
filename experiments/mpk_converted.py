"""Judges and times MPK's own orders on flywheel's kernels: task graphs of whole models, converted, on one H200.

    python experiments/mpk_converted.py > results/gpu/mpk_converted.txt

`error` is the verdict's: the worst tensor of a step, logits included, against the oracle; at most `bound`. `mpk order`
is the median of a launch of the converted program. `shipped` is the median of flywheel's default schedule for the same
step. Both have random weights, bf16 and batch 1, and decode at the position at which MPK was measured.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from mpk_steps import CONTEXT, LLAMA_8B, llama_document

from flywheel.cli.decoding import lower_model
from flywheel.decode.source import open_source
from flywheel.interop.mpk.converting import convert
from flywheel.interop.mpk.graph import MpkGraph, read_graph
from flywheel.ir import TARGETS
from flywheel.judge.trace import trace_step

GRAPHS = Path(__file__).parents[1] / "tests" / "interop" / "mpk" / "graphs"
SAMPLES = {"q06": "qwen3-0.6b", "l1b": "llama3.2-1b", "llama3-8b": "llama3-8b", "q8b": "qwen3-8b"}


def main() -> None:
    """Print the table."""
    print(f"{'graph':10} {'model':12} {'tasks':>6} {'error':>9} {'bound':>7} {'mpk order us':>13} {'shipped us':>11}")
    for name, model in SAMPLES.items():
        source = open_source(model)
        program = convert(graph_of(name), source.spec, TARGETS["h200"], 512)
        converted = trace_step(program, source, CONTEXT - 1, 0)
        shipped = trace_step(lower_model(source, None, "h200", "bf16", 512, "cuda").program, source, CONTEXT - 1, 0)
        verdict = converted.verdict
        assert verdict.passed
        print(
            f"{name:10} {model:12} {len(program.tasks):6} {verdict.error:9.2g} {verdict.bound:7.2g} "
            f"{converted.latency.median_us:13.1f} {shipped.latency.median_us:11.1f}",
            flush=True,
        )


def graph_of(name: str) -> MpkGraph:
    """A sample, or the graph that mpk_steps.py makes."""
    if name == "llama3-8b":
        return read_graph(json.dumps(llama_document(LLAMA_8B)).encode())
    return read_graph(lzma.decompress((GRAPHS / f"{name}.json.xz").read_bytes()))


if __name__ == "__main__":
    main()
