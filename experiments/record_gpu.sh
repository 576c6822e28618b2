#!/usr/bin/env bash
# Records what needs an H200 under results/gpu, each part in the order in which one needs the other:
#
#     experiments/record_gpu.sh OUTPUT COMMIT PART ...
#
# Parts: conformance, sanitizer, probe, search:MODEL[:TRIALS], bench:MODEL, trace:MODEL, noise:MODEL. Those behind a search
# read its store. A part that fails does not keep the others from running; the exit code is the number that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
output="$(mkdir -p "$1" && cd "$1" && pwd)" commit="$2"
shift 2

flywheel() { python3 -m flywheel "$@"; }

part() {
  local kind="$1" model="${2:-}" trials="${3:-50}"
  local store="$output/gpu.db" name="$output/${model}"
  case "$kind" in
    conformance)
      python3 experiments/gpu_conformance.py --commit "$commit" --record "$output/conformance.txt" \
        -n 12 --timeout 120 -p no:benchmark --import-mode=importlib tests/gpu tests/decode tests/vm tests/cli/test_cuda.py ;;
    sanitizer) python3 experiments/sanitize.py --commit "$commit" --record "$output/sanitizer.txt" ;;
    probe) flywheel doctor --probe --store "$store" | tee "$output/doctor.txt" ;;
    search)
      { echo "\$ flywheel search --model $model --gpu h200 --measure cuda --trials $trials   # commit $commit"
        flywheel search --model "$model" --gpu h200 --measure cuda --trials "$trials" --store "$store" \
          --schedule "$name.schedule.json"; } 2>&1 | tee "$name.search.txt"
      local code="${PIPESTATUS[0]}"
      flywheel export --format tsv --store "$store" --output "$output/results.tsv" && return "$code" ;;
    bench)
      { echo "\$ flywheel bench --model $model --against cublas,compile   # commit $commit"
        flywheel bench --model "$model" --against cublas,compile --config "$name.schedule.json" \
          --output "$name.bench.json" --picture "$name.bench.svg"; } 2>&1 | tee "$name.bench.txt" ;;
    trace)
      flywheel trace --config "$name.schedule.json" --output "$name.trace.json" --picture "$name.trace.svg" 2>&1 |
        tee "$name.trace.txt" ;;
    noise) python3 experiments/aa_noise.py --noise "$output/results.tsv" | tee "$output/aa_noise.txt" ;;
    *) echo "record_gpu.sh: part $kind is none of those in its head" >&2; return 2 ;;
  esac
}

failed=0
for each in "$@"; do
  IFS=: read -r kind model trials <<<"$each"
  part "$kind" "$model" ${trials:+"$trials"} || { echo "record_gpu.sh: $each failed" >&2; failed=$((failed + 1)); }
done
exit "$failed"
