#!/usr/bin/env bash
# Records what needs a GPU under results/gpu, each part in the order in which one needs the other:
#
#     experiments/record_gpu.sh OUTPUT COMMIT PART ...
#
# The part `all` stands for everything that docs/results.md says of one GPU (about an hour), and `all-ranks` for what it
# says of two that share a step (about ten minutes). A budget in seconds, as in `LIMIT=550 experiments/record_gpu.sh ...`,
# leaves out parts that would begin later; the last line names them, to be given to the next call. A store in OUTPUT is
# continued. The GPU is an H200 unless FLYWHEEL_GPU names another. A WORK is MODEL[/WEIGHTS[/BATCH[/RANKS]]], as llama3-8b,
# llama3-8b/int4, qwen3-8b/int4/8 or llama3-8b/bf16/1/2; RANKS GPUs share its step.
#
# conformance                      tests on the GPU
# ranks                            tests of programs of several GPUs, on the GPUs here
# formats                          those of quantised weights, of sequences, lookup, sampling, bundles and of what loads programs
# sanitizer                        what compute-sanitizer says
# probe                            the card
# search:WORK[:TRIALS[:TIME]]      the best of 150
# bench:WORK[:RIVALS[:ROUNDS]]     it beside its rivals, in turn
# contexts:WORK[:RIVALS]           the same at 512 and 4096
# batches:WORK[:RIVALS[:BATCHES]]  the same for 1, 2, 4 and 8 sequences
# long:WORK:CONTEXT:TRIALS:TIME    a search at that context, and the best of it beside cublas
# trace:WORK                       where its time goes
# verify:WORK                      the best schedule's tensors against the oracle's
# text:WORK                        200 tokens by the best schedule
# workers:MODEL:TRIALS             a cold search by all GPUs here, and how much they measured at once
# random:WORK[:TRIALS[:TIME]]      200 schedules, to calibrate with
# measured:MODEL:TRIALS:SEEDS      cold searches, seed by seed
# near:MODEL:TRIALS:SEEDS          after how many measurements they are near the best, many seeds at once
# parts:MODEL:ROWS:TRIALS          where the time of the trials in results/gpu/ROWS goes
# generate:MODEL                   a token of a text, and the first one behind a long prompt
# together:MODEL                   tokens of eight sequences
# load:MODEL                       loading a bundle beside weights that are on the GPU
# join:MODEL                       how long sequences wait for a token while another one's prompt is read
# ragged:MODEL                     sequences at positions of their own
# lookup:MODEL                     tokens a launch and us a token with guesses
# serve:WORK[:ENGINES]             what 1 client and 8 wait for behind a server, and behind transformers,vllm
# readme                           README's commands on a random checkpoint
# verdict:MODEL                    what a verdict takes
# mpk                              orders of Mirage MPK on these kernels
# calibrate                        the cost model's constants, from all that the store has measured
# clocks:WORK                      how far SMs' clocks stray from an even rate within a launch
# noise                            whether copies of a schedule beat each other, by the rows of the searches
# versions:OLD                     the recorded schedules of llama3.2-1b and llama3-8b with this tree and with OLD, in turn
# all-reduces:WORK[:ROUNDS]        what a step's all-reduces cost by trace, two launches a round
# kernels:FOLDER[:ROUNDS]          recorded schedules of both models in bf16, int4 and fp8, with this tree's kernels and with those in
#                                  FOLDER, which is the flywheel/vm/cuda of another tree, in turn
#
# The store is OUTPUT/gpu.db, or the FLYWHEEL_STORE that is given. What stands behind a search reads the work's best schedule
# from it; where the store has none, the one that comes with flywheel. Commands run in OUTPUT, so that what they record names
# no folder. A part that fails does not keep the others from running; the exit code is the number that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
root="$PWD" output="$(mkdir -p "$1" && cd "$1" && pwd)" commit="$2"
shift 2
export FLYWHEEL_COMMIT="$commit"  # for rows: this may be a copy that git knows nothing of
gpu="${FLYWHEEL_GPU:-h200}"
unset FLYWHEEL_GPU  # to the command it means --gpu, which would keep rows of 2xh100 out of a table
export FLYWHEEL_STORE="${FLYWHEEL_STORE:-gpu.db}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

flywheel() { (cd "$output" && python3 -m flywheel "$@"); }

# Runs a command of flywheel and keeps what it said in FILE, behind the line that asked for it.
record() {
  local file="$1"
  shift
  { echo "\$ flywheel $*   # commit $commit"; flywheel "$@"; } 2>&1 | tee -i "$output/$file"
}

# The same of a script of experiments.
script() {
  local file="$1" name="$2"
  shift 2
  { echo "\$ python experiments/$name $*   # commit $commit"; (cd "$output" && python3 "$root/experiments/$name" "$@"); } 2>&1 |
    tee -i "$output/$file"
}

# Without the tests that take two GPUs.
one_gpu=(--ignore tests/vm/gpu/test_peers.py -k "not to_another_gpu")

# Tests on the GPU, counted in FILE.
tests() {
  python3 experiments/gpu_conformance.py --commit "$commit" --record "$output/$1" \
    -n 12 --timeout "$2" -p no:benchmark --import-mode=importlib "${@:3}"
}

search() {
  local name="$1" code=0
  record "$name.txt" search --gpu "$gpu" --measure cuda "${@:2}" || code=$?
  flywheel export --format tsv --output results.tsv && return "$code"
}

# The best schedule that the store has of a work at context 512, else the one that comes with flywheel, as FILE.
best() {
  local file="$1" model="$2" weights="$3" batch="$4" ranks="${5:-1}" of="$gpu"
  [[ "$ranks" == 1 ]] || of="${ranks}x$gpu"
  flywheel export --format schedule --measured --model "$model" --gpu "$of" --weights "$weights" --batch "$batch" \
    --output "$file" || cp "flywheel/schedules/$model-$of-bf16$([[ $weights == bf16 ]] || echo "-$weights")-c512-b$batch.json" "$output/$file"
}

# What bench records, of the store's best of each context and batch, else what comes with flywheel.
bench() (
  name="$1" rivals="$2"
  # A store that is named has to be there.
  (cd "$output" && [[ "$FLYWHEEL_STORE" == *:* || -e "$FLYWHEEL_STORE" ]]) || unset FLYWHEEL_STORE
  record "$name.txt" bench --output "$name.json" --picture "$name.svg" ${rivals:+--against "$rivals"} "${@:3}"
)

part() {
  local kind="$1" work="$2" more="$3" rest="$4"
  local model weights batch ranks
  IFS=/ read -r model weights batch ranks <<<"$work"
  weights="${weights:-bf16}" batch="${batch:-1}" ranks="${ranks:-1}"
  local name="$model"
  [[ "$weights" == bf16 ]] || name+=".$weights"
  [[ "$batch" == 1 ]] || name+=".b$batch"
  [[ "$ranks" == 1 ]] || name+=".r$ranks"
  local of=(--model "$model" --weights "$weights" --batch "$batch" --ranks "$ranks")
  case "$kind" in
    conformance)
      tests conformance.txt 300 tests/gpu tests/conformance tests/decode tests/judge tests/rivals tests/runtime tests/vm \
        tests/cli/test_cuda.py tests/cli/test_quantised_checkpoints.py tests/interop/mpk/test_converting.py "${one_gpu[@]}" ;;
    ranks) tests ranks.txt 300 -n 0 tests/vm/gpu/test_peers.py tests/vm/gpu/test_probes.py tests/decode/test_ranks_on_one_gpu.py ;;
    formats)
      tests formats.txt 300 tests/cli/test_quantised_checkpoints.py tests/decode/test_formats_on_gpu.py \
        tests/gpu/test_coded.py tests/decode/test_sequences_on_the_gpu.py tests/decode/test_lanes_on_the_gpu.py \
        tests/decode/test_sampling.py tests/runtime/test_bundle_on_gpu.py tests/vm/gpu "${one_gpu[@]}" ;;
    sanitizer) python3 experiments/sanitize.py --commit "$commit" --record "$output/sanitizer.txt" ;;
    probe) record doctor.txt doctor --probe ;;
    search)
      search "$name.search" "${of[@]}" --trials "${more:-150}" ${rest:+--time "$rest"} &&
        best "$name.schedule.json" "$model" "$weights" "$batch" "$ranks" ;;
    random) search "$name.random" "${of[@]}" --trials "${more:-200}" ${rest:+--time "$rest"} --sampler random --no-seeds ;;
    bench) bench "$name.bench" "$more" "${of[@]}" ${rest:+--rounds "$rest"} ;;
    contexts) bench "$name.contexts" "$more" "${of[@]}" --context 512,4096 ;;
    batches) bench "$name.batches" "$more" --model "$model" --weights "$weights" --batch "${rest:-1,2,4,8}" ;;
    long)
      local time="${rest#*:}"
      search "$name.c$more.search" "${of[@]}" --context "$more" --trials "${rest%%:*}" ${time:+--time "$time"} &&
        bench "$name.c$more.bench" cublas "${of[@]}" --context "$more" --rounds 3 ;;
    trace)
      best "$name.schedule.json" "$model" "$weights" "$batch" "$ranks" &&
        record "$name.trace.txt" trace --config "$name.schedule.json" "${of[@]}" --output "$name.trace.json" \
          --picture "$name.trace.svg" ;;
    verify)
      best "$name.schedule.json" "$model" "$weights" "$batch" "$ranks" &&
        record "$name.verify.txt" verify --config "$name.schedule.json" "${of[@]}" --device cuda ;;
    text)
      best "$name.schedule.json" "$model" "$weights" "$batch" "$ranks" &&
        record "$name.text.txt" generate --config "$name.schedule.json" --model "$model" --weights "$weights" \
          --ranks "$ranks" --device cuda --prompt-ids 1,2,3 --max-tokens 200 --json ;;
    workers)
      search "$model.workers" --model "$model" --cold --trials "${more:-150}" --name "$model.workers" &&
        script "$model.workers_overlap.txt" workers_overlap.py results.tsv "$model.workers" ;;
    measured)
      script "$model.measured_search.txt" measured_search.py --gpu "$gpu" --works "$model:$more:$rest" \
        --tsv "$model.measured_search.tsv" ;;
    near)
      script "$model.measured_near.txt" measured_near.py --gpu "$gpu" --works "$model:$more:$rest" \
        --tsv "$model.measured_near.tsv" ;;
    parts)
      script "$model.measured_parts.txt" measured_parts.py --works "$model:$more:$rest"
      script "$model.measured_profile.txt" measured_parts.py --works "$model:$more:$rest" --profile 45 ;;
    generate)
      best "$name.schedule.json" "$model" bf16 1 &&
        script "$name.generate_speed.txt" generate_speed.py --gpu "$gpu" --works "$model:$name.schedule.json" ;;
    together) script "$name.together.txt" together.py "$model" --max-sequences 1 8 --sampling greedy warm top_p ;;
    join) script "$name.join_gap.txt" join_gap.py "$model" ;;
    load) script "$name.load_speed.txt" load_speed.py "$model" --gpu "$gpu" --gpu-too ;;
    ragged) script "$name.ragged.txt" ragged.py "$model" ;;
    lookup) script "$name.lookup_speed.txt" lookup_speed.py --model "$model" --gpu "$gpu" ;;
    serve)
      local rows
      for rows in 1 8; do  # without one, the server takes what a search tries first
        best "${name}$([[ $rows == 1 ]] || echo ".b$rows").schedule.json" "$model" "$weights" "$rows" || true
      done
      script "$name.serve_speed.txt" serve_speed.py "$model" --weights "$weights" ${more:+--engines "$more"} ;;
    readme) script readme_commands.txt readme_commands.py ;;
    verdict) script "$name.verdict_speed.txt" verdict_speed.py --model "$model" --gpu "$gpu" --device cuda ;;
    mpk) script mpk_converted.txt mpk_converted.py ;;
    calibrate) record calibrate.txt calibrate --gpu "$gpu" --output machine.json ;;
    versions) python3 experiments/two_versions.py "$work" . results/gpu/llama3.2-1b.schedule.json \
        results/gpu/llama3-8b.schedule.json --gpu "$gpu" --record "$output/two_versions.txt" ;;
    clocks)
      best "$name.schedule.json" "$model" "$weights" "$batch" "$ranks" &&
        (cd "$output" && python3 "$root/experiments/sm_clocks.py" "$name.schedule.json" --commit "$commit" \
          --record "$name.clocks.txt") ;;
    kernels) python3 experiments/in_turn.py results/gpu/llama3{.2-1b,-8b}{,.int4,.fp8}.schedule.json \
        --kernels "old=$work" here ${more:+--rounds "$more"} --commit "$commit" --record "$output/kernels.txt" ;;
    all-reduces)
      best "$name.schedule.json" "$model" "$weights" "$batch" "$ranks" &&
        (cd "$output" && python3 "$root/experiments/in_turn.py" "$name.schedule.json" --rounds "${more:-3}" --traced 2 \
          --commit "$commit" --record "$name.all_reduces.txt") ;;
    noise) python3 experiments/aa_noise.py --noise "$output/results.tsv" | tee -i "$output/aa_noise.txt" ;;
    *) echo "record_gpu.sh: part $kind is none of those in its head" >&2; return 2 ;;
  esac
}

# What docs/results.md has of one GPU.
all=(
  probe
  search:llama3.2-1b bench:llama3.2-1b:cublas,compile:3 trace:llama3.2-1b
  search:llama3-8b bench:llama3-8b:cublas,compile:3 trace:llama3-8b
  search:llama3-8b/int8:250 bench:llama3-8b/int8:cublas,compile-int8:3 trace:llama3-8b/int8
  search:llama3-8b/fp8:250 bench:llama3-8b/fp8:cublas,compile-fp8:3 trace:llama3-8b/fp8
  search:llama3-8b/int4:250 bench:llama3-8b/int4:cublas,tinygemm,triton:3 trace:llama3-8b/int4
  search:llama3.2-1b/int4:250 bench:llama3.2-1b/int4:cublas,tinygemm,triton:3 trace:llama3.2-1b/int4
  search:llama3.2-1b/fp8:250 bench:llama3.2-1b/fp8:cublas,compile-fp8:3 trace:llama3.2-1b/fp8
  search:llama3.2-1b/int8:150 bench:llama3.2-1b/int8:cublas,compile-int8:3
  search:llama3-70b/int4:30 bench:llama3-70b/int4:tinygemm:2
  search:qwen3-8b/int4:150 search:qwen3-8b/int4/8:150:60 batches:qwen3-8b/int4:cublas,triton:1,8 trace:qwen3-8b/int4/8
  search:qwen3-0.6b bench:qwen3-0.6b:compile:3
  batches:llama3.2-1b:cublas batches:llama3-8b:cublas contexts:llama3.2-1b:cublas
  long:llama3.1-8b:32768:25:45
  generate:llama3.2-1b generate:llama3-8b serve:llama3-8b together:llama3.2-1b ragged:llama3.2-1b ragged:llama3-8b
  join:llama3-8b load:llama3-8b lookup:llama3.2-1b lookup:llama3-8b verdict:llama3.2-1b verdict:llama3-8b mpk sanitizer readme
  random:llama3.2-1b random:llama3.2-1b/int4:150 random:llama3.2-1b/fp8:150
  random:llama3-8b random:llama3-8b/int4:150 random:llama3-8b/fp8:150
  measured:llama3.2-1b:150:2 measured:llama3-8b:150:2
  near:llama3.2-1b:60:5 near:llama3-8b:60:5
  noise conformance
)
# And of two.
all_ranks=(
  probe
  search:llama3-8b/bf16/1/2:150 search:llama3.2-1b/bf16/1/2:150 search:llama3-8b/int4/1/2:150
  search:llama3-70b/bf16/1/2:25:60 bench:llama3-70b/bf16/1/2:nccl:2
  trace:llama3.2-1b/bf16/1/2 trace:llama3-8b/bf16/1/2 trace:llama3-8b/int4/1/2
  clocks:llama3-8b/bf16/1/2 clocks:llama3-8b/int4/1/2
  bench:llama3-8b/bf16/1/2:nccl,nccl-compile:2 bench:llama3.2-1b/bf16/1/2:nccl,nccl-compile:2
  ranks
)

failed=0 left=()
parts=()
for each in "$@"; do
  case "$each" in
    all) parts+=("${all[@]}") ;;
    all-ranks) parts+=("${all_ranks[@]}") ;;
    *) parts+=("$each") ;;
  esac
done
for each in "${parts[@]}"; do
  if [[ -n "${LIMIT:-}" ]] && ((SECONDS >= LIMIT)); then
    left+=("$each")
    continue
  fi
  IFS=: read -r kind work more rest <<<"$each"
  began=$SECONDS
  part "$kind" "$work" "$more" "$rest" || { echo "record_gpu.sh: $each failed" >&2; failed=$((failed + 1)); }
  echo "record_gpu.sh: $each took $((SECONDS - began)) s" | tee -a "$output/parts.txt"
done
((${#left[@]} == 0)) || echo "record_gpu.sh: left for another call: ${left[*]}" | tee -a "$output/parts.txt"
exit "$failed"
