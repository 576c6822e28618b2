#!/usr/bin/env bash
# Records what needs no GPU under results/, into OUTPUT/PART.txt:
#
#     experiments/record_cpu.sh OUTPUT COMMIT [PART ...]
#
# Without a PART: `times` and `checks`. A PART is a name below, or `times`, `checks` or `long`, which stand for their lists.
# Numbers behind a part's name replace its sizes, which the output names: crash_resume:50.
#
# times, one after another, since they time things or use every core:
#   search_rate serve_host ask_threads load_speed lowering_speed pack_speed mpk_speed reference_speed validate_scaling
#   compile_speed samplers warm_start judge_samplers serve_storm
#   crash_resume[:KILLS]      20 kills for each of 8 campaigns; needs PostgreSQL's server
#   first_use[:ROUNDS]        4 rounds of each fault of the cache of compiled code
#   faults[:KILLS]            10 kills for each campaign that is killed; needs PostgreSQL's server
#   serve_faults[:FAULTS[:SEED]]  60 faults of a server, from seed 1 on
#   fuzz[:MINUTES[:SEED]]     4 minutes of all cores, from case 400000 on
# checks, as many at once as there are cores, each on one:
#   cache_memory lookup_acceptance mpk_steps ranks_predicted shipped_predicted long_context aa_noise aa_noise_gpu
#   calibration three_way quantised_checkpoints t4_roundtrip knob_gains config_mutations
#   operation_laws[:MUTANTS[:LAUNCHED]]  10,000 for the reference VM, 200 for each of the emulator's 5 variants
#   proof_by_layers[:MUTANTS]            10,000
#   proof_by_runs[:MUTANTS]              10,000
# long, each for more than six minutes of two cores; they run one after another:
#   tampering[:DRAWS]                    200 configs
#   predicted_regret[:SEEDS]             5 seeds a work
#   replay_measured mpk_orders emulated
#
# The packages are those of `pip install -e .[dev]`. What else a part needs (Kernel Tuner, compressed-tensors), it installs
# with pip into a folder that is removed at the end. PYTHON names the interpreter: .venv/bin/python or python3 by default.
# Commands run in a folder where `results` is that of this tree. A part that fails does not keep the others from running;
# the exit code is the number that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
root="$PWD" output="$(mkdir -p "$1" && cd "$1" && pwd)" commit="$2"
shift 2
python="${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python3)}"
[[ "$python" != */* ]] || python="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
unset FLYWHEEL_STORE FLYWHEEL_GPU  # what they name would get into the outputs
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
ln -s "$root/results" "$scratch/results"
cores="$(getconf _NPROCESSORS_ONLN)"

times=(search_rate serve_host ask_threads load_speed lowering_speed pack_speed mpk_speed reference_speed validate_scaling
  compile_speed samplers warm_start judge_samplers serve_storm crash_resume faults first_use serve_faults
  fuzz)
checks=(long_context operation_laws proof_by_layers proof_by_runs aa_noise aa_noise_gpu three_way calibration
  ranks_predicted shipped_predicted quantised_checkpoints t4_roundtrip cache_memory lookup_acceptance mpk_steps
  knob_gains config_mutations)
long=(tampering predicted_regret replay_measured mpk_orders emulated)

# The line that asked for an output, and where it was made.
head_of() {
  local word said=""
  for word in "$@"; do
    [[ "$word" != *" "* ]] || word="\"$word\""
    said+=" $word"
  done
  echo "\$$said   # commit $commit"
  "$python" -c 'import os, platform, time
print(time.strftime("%Y-%m-%d %H:%M"), "Python " + platform.python_version(), f"{os.cpu_count()} cores",
      f"load {os.getloadavg()[0]:.1f} before", sep=", ")'
}

# Runs a script of experiments.
script() {
  local name="$1"
  shift
  head_of python "experiments/$name" "$@"
  (cd "$scratch" && "$python" "$root/experiments/$name" "$@")
}

# Runs a command of flywheel.
flywheel() {
  head_of flywheel "$@"
  (cd "$scratch" && "$python" -m flywheel "$@")
}

# Runs tests; what they test is their names.
tests() {
  head_of python -m pytest "$@"
  "$python" -m pytest -p no:cacheprovider --no-header "$@"  # the header names folders
}

# Runs the last command with packages that flywheel does not need; up to --, what pip is to install.
with_packages() {
  local wanted=() folder
  while [[ "$1" != -- ]]; do wanted+=("$1"); shift; done
  shift
  folder="$(mktemp -d "$scratch/packages.XXX")"
  "$python" -m pip install --quiet --disable-pip-version-check --target "$folder" "${wanted[@]}" >"$folder.log" 2>&1 ||
    { cat "$folder.log"; return 1; }
  PYTHONPATH="$folder:$PYTHONPATH" "$@"
}

# Leaves out what a command writes to stderr, unless it fails.
quiet() {
  local said
  said="$(mktemp "$scratch/said.XXX")"
  "$@" 2>"$said" || { cat "$said"; return 1; }
}

judge_samplers() {
  local space=judge_samplers_space.csv.gz failed=0
  script judge_samplers.py record --space "$space" && cp "$scratch/$space" "$output" || return
  echo
  script judge_samplers.py ours --space "$space" --only descent,local,random,tpe,cmaes,grid || failed=1
  echo
  with_packages kernel_tuner==1.5.0 scikit-learn -- script judge_samplers.py kernel-tuner --space "$space" || failed=1
  return "$failed"
}

calibration() {
  local table=results/gpu/calibration.tsv campaign each randoms=() only=() kernels=()
  head_of flywheel import "$table" --campaign EACH --name EACH --store calibration.db
  for campaign in $(tail -n +2 "$table" | cut -f 1 | sort -u); do
    (cd "$scratch" && "$python" -m flywheel import "$table" --campaign "$campaign" --name "$campaign" \
      --store calibration.db >/dev/null) || return
    case "$campaign" in *-int4-*-random-* | *-fp8-*-random-*) randoms+=(--campaign "$campaign") ;; esac
  done
  for each in fp8 int8 int4; do only+=(--only "consumer.${each}_times"); done
  for each in c5bed74f5bbd4a94 90a33d03cc8a4d86 4883e04f8af3cd75; do kernels+=(--kernels "$each"); done  # of bf16 and int8
  ((${#randoms[@]})) && fitted "${only[@]}" "${kernels[@]}" && fitted "${randoms[@]}" || return
  echo && script cost_model_campaigns.py "$table"
}

fitted() {
  echo
  flywheel calibrate --gpu h200 --held-back 0.6 "$@" --jobs 1 --store calibration.db --output machine.json
}

emulated() {
  local few="not (test_models and (every_pattern and llama or configs_of or generated or repeat))" failed=0 arch
  echo "Tests of the GPU on the kernel's sources as C++, each thread a fiber; $(g++ --version | sed 1q)"
  for arch in 90 80; do
    tests -q -n "$cores" --emulate-gpu="$arch" tests/gpu -k "$few" || failed=1
    echo
  done
  tests -q -n "$cores" --emulate-gpu=90 tests/gpu/test_models.py -k "configs_of or repeat" || failed=1
  return "$failed"
}

timed() {
  local size="$2" more="$3"
  case "$1" in
    search_rate)
      script search_rate.py && echo && script search_rate.py --jobs 1 --models llama3-8b,llama3.2-1b ;;
    pack_speed) script pack_speed.py && echo && script pack_speed.py --models llama3-8b --ranks 2 ;;
    reference_speed) script reference_speed.py llama3.2-1b 512 ;;
    samplers)
      script samplers.py --samplers descent,local,tpe,random --seeds 5 && echo &&
        script samplers.py --works llama3.2-1b/h200 --seeds 5 --trials 80 --samplers descent,local,tpe,random ;;
    warm_start) script warm_start.py --seeds 3 ;;
    replay_measured) script replay_measured.py ;;
    judge_samplers | emulated) "$1" ;;
    serve_storm) tests -v --durations 1 -m slow tests/serve/test_server.py -k ten_thousand ;;
    crash_resume)
      script crash_resume.py --kills "${size:-20}" && echo && script crash_resume.py --kills "${size:-20}" --postgresql ;;
    first_use) script first_use.py --rounds "${size:-4}" ;;
    faults) script faults.py --kills "${size:-10}" ;;
    serve_faults) script serve_faults.py --faults "${size:-60}" --seed "${more:-1}" ;;
    fuzz) script fuzz.py --processes "$cores" --minutes "${size:-4}" --seed "${more:-400000}" ;;
    tampering)
      script tampering.py --part wrong --layers 3 && script tampering.py --part formats &&
        script tampering.py --part right --draws "${size:-200}" ;;
    predicted_regret)
      script predicted_regret.py --seeds "${size:-5}" && echo &&
        script predicted_regret.py --seeds "${size:-5}" --works llama3.2-3b/h200 ;;
    *) script "$1.py" ;;
  esac
}

checked() {
  local size="$2" more="$3"
  export OMP_NUM_THREADS=1
  case "$1" in
    aa_noise_gpu) script aa_noise.py --noise results/gpu/results.tsv ;;
    calibration) calibration ;;
    config_mutations) script config_mutations.py --count "${size:-5000}" ;;
    knob_gains) script gains.py --knobs ;;
    operation_laws)
      script operation_laws.py "${size:-10000}" && echo && script operation_laws.py --emulated "${more:-200}" ;;
    proof_by_layers) script proofs.py layers --configs 500 --mutants "${size:-10000}" ;;
    proof_by_runs) script proofs.py runs --configs 600 --mutants "${size:-10000}" ;;
    quantised_checkpoints)
      with_packages --no-deps compressed-tensors==0.20.0 loguru psutil -- quiet script quantised_checkpoints.py checkpoints ;;
    t4_roundtrip)
      mkdir -p "$scratch/t4" && script t4_roundtrip.py write t4 &&
        with_packages kernel_tuner==1.5.0 autotuning_methodology==1.1.0 -- quiet script t4_roundtrip.py read t4 ;;
    *) script "$1.py" ;;
  esac
}

# Runs HOW of one part, and keeps what it says.
keep() {
  local how="$1" part size more began="$SECONDS"
  IFS=: read -r part size more <<<"$2"
  if "$how" "$part" "$size" "$more" >"$output/$part.txt" 2>&1; then
    echo "$part: $((SECONDS - began)) s"
  else
    echo "record_cpu.sh: $2 failed after $((SECONDS - began)) s: $(tail -n 1 "$output/$part.txt")" >&2
    echo "$2" >>"$scratch/failed"
  fi
}

wanted=() one_by_one=() at_once=()
(($#)) || set -- times checks
for each in "$@"; do
  case "$each" in
    times) wanted+=("${times[@]}") ;;
    checks) wanted+=("${checks[@]}") ;;
    long) wanted+=("${long[@]}") ;;
    *) wanted+=("$each") ;;
  esac
done
for each in "${wanted[@]}"; do
  case " ${times[*]} ${long[*]} | ${checks[*]} " in
    *" ${each%%:*} "*"|"*) one_by_one+=("$each") ;;
    *"|"*" ${each%%:*} "*) at_once+=("$each") ;;
    *) echo "record_cpu.sh: part $each is none of those in its head" >&2; exit 2 ;;
  esac
done
# Else the first one would say that it compiles, and take longer.
"$python" -m flywheel search --model llama3.2-1b --gpu h200 --measure predict --trials 1 --store "$scratch/first.db" \
  >"$scratch/first.log" 2>&1 || { cat "$scratch/first.log" >&2; exit 1; }
for each in ${one_by_one[@]+"${one_by_one[@]}"}; do keep timed "$each"; done
running=0
for each in ${at_once[@]+"${at_once[@]}"}; do
  if ((running == cores)); then wait -n; running=$((running - 1)); fi
  keep checked "$each" &
  running=$((running + 1))
done
wait
failed=0
[[ ! -e "$scratch/failed" ]] || failed="$(grep -c . "$scratch/failed")"
exit "$failed"
