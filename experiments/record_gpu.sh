#!/usr/bin/env bash
# Records what needs an H200 under results/gpu, each part in the order in which one needs the other:
#
#     experiments/record_gpu.sh OUTPUT COMMIT PART ...
#
# conformance                 tests on the GPU             sanitizer             what compute-sanitizer says
# probe                       the card                     noise                 whether copies of a schedule beat each other
# search:MODEL[:TRIALS]       the best of 150              bench:MODEL[:RIVALS]  it beside cublas,compile
# contexts:MODEL[:RIVALS]     the same at 512 and 4096     batches:MODEL[:RIVALS]  the same for 1, 2, 4 and 8 sequences
# trace:MODEL                 where its time goes          random:MODEL[:TRIALS]   200 schedules, to calibrate with
# calibrate                   the cost model's constants, from all that the store has measured
# versions:OLD                the recorded schedules of llama3.2-1b and llama3-8b with this tree and with that of OLD, in turn
#
# The store is OUTPUT/gpu.db, or the FLYWHEEL_STORE that is given; what stands behind a search reads the model's best schedule
# from it. Commands run in OUTPUT, so that what they record names no folder. A part that fails does not keep the others from
# running; the exit code is the number that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
output="$(mkdir -p "$1" && cd "$1" && pwd)" commit="$2"
shift 2
export FLYWHEEL_COMMIT="$commit"  # for rows: this may be a copy that git knows nothing of
export FLYWHEEL_STORE="${FLYWHEEL_STORE:-gpu.db}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

flywheel() { (cd "$output" && python3 -m flywheel "$@"); }

# Runs a command of flywheel and keeps what it said in FILE, behind the line that asked for it.
record() {
  local file="$1"
  shift
  { echo "\$ flywheel $*   # commit $commit"; flywheel "$@"; } 2>&1 | tee "$output/$file"
}

search() {
  local code=0
  record "$1.txt" search --gpu h200 --measure cuda "${@:2}" || code=$?
  flywheel export --format tsv --output results.tsv && return "$code"
}

# The best schedule that the store has of a model for one sequence at context 512, as a file.
best() {
  flywheel export --format schedule --measured --model "$1" --gpu h200 --output "$1.schedule.json"
}

bench() {
  local name="$1" model="$2"
  best "$model" && record "$name.txt" bench --model "$model" --config "$model.schedule.json" \
    --output "$name.json" --picture "$name.svg" "${@:3}"
}

part() {
  local kind="$1" model="${2:-}" more="${3:-}"
  local name="$model.$kind"
  case "$kind" in
    conformance)
      python3 experiments/gpu_conformance.py --commit "$commit" --record "$output/conformance.txt" \
        -n 12 --timeout 120 -p no:benchmark --import-mode=importlib tests/gpu tests/decode tests/vm tests/cli/test_cuda.py ;;
    sanitizer) python3 experiments/sanitize.py --commit "$commit" --record "$output/sanitizer.txt" ;;
    probe) record doctor.txt doctor --probe ;;
    search) search "$name" --model "$model" --trials "${more:-150}" ;;
    random) search "$name" --model "$model" --trials "${more:-200}" --sampler random --no-seeds ;;
    bench) bench "$name" "$model" --against "${more:-cublas,compile}" ;;
    contexts) bench "$name" "$model" --against "${more:-cublas,compile}" --context 512,4096 ;;
    batches) bench "$name" "$model" --against "${more:-cublas,compile}" --batch 1,2,4,8 ;;
    trace)
      best "$model" && record "$name.txt" trace --config "$model.schedule.json" --output "$name.json" \
        --picture "$name.svg" ;;
    calibrate) record calibrate.txt calibrate --gpu h200 --output machine.json ;;
    versions) python3 experiments/two_versions.py "$model" . results/gpu/llama3.2-1b.schedule.json \
        results/gpu/llama3-8b.schedule.json --record "$output/two_versions.txt" ;;
    noise) python3 experiments/aa_noise.py --noise "$output/results.tsv" | tee "$output/aa_noise.txt" ;;
    *) echo "record_gpu.sh: part $kind is none of those in its head" >&2; return 2 ;;
  esac
}

failed=0
for each in "$@"; do
  IFS=: read -r kind model more <<<"$each"
  part "$kind" "$model" "$more" || { echo "record_gpu.sh: $each failed" >&2; failed=$((failed + 1)); }
done
exit "$failed"
