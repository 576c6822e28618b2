#!/bin/sh
# Search and measure llama3.1-8b at 32768 positions, one sequence, on the one H200 here; the bar is 5.2 ms. About 20 minutes.
#     experiments/long_context.sh OUTPUT_DIRECTORY
set -eu
out=${1:?usage: long_context.sh OUTPUT_DIRECTORY}
mkdir -p "$out"
schedule=$out/llama3.1-8b-c32768.schedule.json
flywheel search --store "$out/long.db" --name c32k --model llama3.1-8b --gpu h200 --context 32768 --time 15m
flywheel export --store "$out/long.db" --format schedule --measured --campaign c32k --output "$schedule"
flywheel bench --model llama3.1-8b --config "$schedule" --context 32768 --against cublas -o "$out/bench_c32768.json"
flywheel trace --model llama3.1-8b --config "$schedule" >"$out/trace_c32768.txt"
