#!/usr/bin/env bash
# Traces and their simulation as their users meet them: a run recorded and repeated, other policies and sizes, wrong files and options.
#
#     tests/sim_test.sh STRATA
#
# Faults come from tests/fault_shim.c, built beside the tests.
set -u
strata=${1:?usage: tests/sim_test.sh STRATA}
shim=$(cd "$(dirname "$strata")" && pwd)/tests/fault_shim.so
model=models/pebble/pebble.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
slower=1
if [ -n "${STRATA_TEST_SANITIZER:-}" ]; then
    slower=10 # of the time limits
    export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}verify_asan_link_order=0
fi

# ---- How a test is written ------------------------------------------------------------------------------------------------------------

# Runs strata, stopped after 60 s; leaves code, $work/out and $work/err. With `fault` set (VARIABLE=VALUE ...), under the shim.
fault=
try() {
    # shellcheck disable=SC2086 # words
    { timeout -k 2 $((60 * slower)) env ${fault:+LD_PRELOAD="$shim"} $fault "$strata" "$@" >"$work/out" 2>"$work/err" </dev/null; } 2>/dev/null
    code=$? # bash would announce what was killed
}

pass() { passed=$((passed + 1)); }

fail() { # SENTENCE: what was wanted
    failed=$((failed + 1))
    echo "FAILED: $1 (exit code $code)"
    head -c 600 "$work/out" | sed 's/^/    out: /'
    head -c 600 "$work/err" | sed 's/^/    err: /'
}

# SENTENCE CONDITION...: a command that holds or does not.
check() {
    local sentence=$1
    shift
    if "$@"; then pass; else fail "$sentence"; fi
}

exited() { [ "$code" -eq "$1" ]; }
# One line that begins with "strata: " and matches; nothing on stdout.
one_line() { [ "$(wc -l <"$work/err")" -eq 1 ] && grep -qE "^strata: .*$1" "$work/err" && [ ! -s "$work/out" ]; }
failed_with() { exited 1 && one_line "$1"; }
misused_with() { exited 2 && grep -qE "^strata: .*$1" "$work/err" && grep -qE "^Try 'strata.* --help'" "$work/err" && [ ! -s "$work/out" ]; }
said() { grep -qE -- "$1" "$work/$2"; }
quiet() { exited 0 && [ ! -s "$work/err" ]; }

if [ ! -e "$shim" ]; then
    code=0
    : >"$work/out"
    echo "make ${shim#"$PWD"/}" >"$work/err"
    fail "the library that makes faults is there"
fi

# FILE KEY: the number in one line of JSON.
number() { sed -nE "s/.*\"$2\":([0-9.]+).*/\\1/p" "$1" | head -n 1; }

# ---- Help and wrong usage -------------------------------------------------------------------------------------------------------------

try sim --help
check "'strata sim --help' explains it" eval "quiet && said '^Usage: strata sim' out && said '^  lfu ' out && said '^  none ' out"
try --help
check "'strata --help' lists it" said '^  sim ' out
while IFS='|' read -r sentence line; do
    # shellcheck disable=SC2086 # words
    try $line
    check "wrong usage: strata $line" misused_with "$sentence"
done <<'CASES'
no trace|sim
no trace|sim --json
one trace at a time|sim a b
wrong option|sim a --colour
wrong option|sim a --part
--policy best: there is no policy 'best'|sim a --policy best
--policy lfu:size=3: policy setting 'size=3'|sim a --policy lfu:size=3
--slots and --part exclude each other|sim a --slots 3 --part 5
--part and --vram exclude each other|sim a --part 5 --vram 5M
--slots -1: wanted a whole number from 0|sim a --slots -1
--slots 1.5: wanted a whole number|sim a --slots 1.5
--slots : wanted a whole number|sim a --slots 3,,4
--part 101: wanted a number from 0 to 100|sim a --part 6,101
--part nan: wanted a number from 0 to 100|sim a --part nan
--vram 3X: wanted a size such as 4M|sim a --vram 3X
--vram -3M: wanted a size such as 4M|sim a --vram -3M
--swaps -1: wanted a whole number from 0|sim a --swaps -1
--swap-period 0: wanted a whole number from 1|sim a --swap-period 0
--swap-lag 0: wanted a whole number from 1|sim a --swap-lag 0
CASES
# shellcheck disable=SC2046 # words
try sim a $(printf -- '--policy lru %.0s' $(seq 17))
check "17 policies are too many" misused_with "more than 16 policies"
try sim a --part "$(seq -s , 1 65)"
check "65 sizes are too many" misused_with "more than 64 sizes"

# ---- A run, recorded and repeated -----------------------------------------------------------------------------------------------------

trace=$work/trace
run=(run -m "$model" -q --temp 0 -p "One morning the old captain" --device sim --stats=json)
# NAME RUN-OPTIONS...: records a run, with its statistics in $work/NAME.stats.
recorded() {
    local name=$1
    shift
    try "${run[@]}" "$@" --trace "$work/$name"
    grep '^{' "$work/err" >"$work/$name.stats"
    exited 0
}
# NAME SIM-OPTIONS...: the counters of the simulation are those of the run.
repeats() {
    local name=$1 key
    shift
    try sim "$work/$name" --json "$@"
    quiet || return 1
    for key in windows requests hits slots swaps swap_bytes; do
        [ -n "$(number "$work/out" $key)" ] && [ "$(number "$work/out" $key)" = "$(number "$work/$name.stats" $key)" ] || return 1
    done
}
check "a run is recorded" recorded trace -n 100 --sim-vram 3M
check "its simulation counts what it counted" repeats trace
check "and something was hit and swapped" eval "[ $(number "$work/trace.stats" hits) -gt 100 ] && [ $(number "$work/trace.stats" swaps) -gt 10 ]"
check "a run of another policy and pace is recorded" recorded other -n 60 --sim-vram 5M --policy lru:hysteresis=3 --swaps 7 --swap-period 5 --swap-lag 2
check "its simulation repeats it" repeats other
check "with what the recording says of it" eval "said '\"policy\":\"lru:half-life=0,admit=-1e\\+06,hysteresis=3\",\"swaps_at_once\":7,\"swap_period\":5,\"swap_lag\":2' out"
try sim "$trace" --json --vram 5M --policy lru:hysteresis=3 --swaps 7 --swap-period 5 --swap-lag 2
cp "$work/out" "$work/tried"
check "another run's settings can be tried on a trace" recorded again -n 100 --sim-vram 5M --policy lru:hysteresis=3 --swaps 7 --swap-period 5 --swap-lag 2
try sim "$work/again" --json
check "and count what such a run counts" eval "quiet && cmp -s $work/out $work/tried"

check "a run writes a profile" recorded first -n 60 --sim-vram 3M --profile-save "$work/profile"
check "a run that begins with it is recorded" recorded second -n 60 --sim-vram 3M --profile "$work/profile"
check "the same profile repeats it" repeats second --profile "$work/profile"

echo "not to be lost" >"$work/letter"
for option in trace profile-save; do
    try run -m "$model" -p "The sea" -n 2 -q --device sim --sim-vram 1M "--$option" "$work/letter"
    check "--$option does not replace another kind of file" eval "[ $code -ne 0 ] && said 'letter exists and is no (trace|profile): it is not replaced' err && grep -q '^not to be lost$' $work/letter"
done
check "without it, it is another run" eval "! repeats second"

try "${run[@]}" -n 20 --device cpu --trace "$work/cpu"
check "a run without a device is recorded" exited 0
try sim "$work/cpu"
check "its simulation has no slots, and says so" eval "exited 0 && said '^slots           0 of 384 ' out && said '^hits            0$' out && said '^strata: the recorded run had no device' err"
try sim "$work/cpu" --part 25
check "with a size it has" eval "quiet && said '^slots           96 of 384 experts \(25.0 %\)$' out && said '^windows         20$' out"

# ---- What it prints -------------------------------------------------------------------------------------------------------------------

try sim "$trace"
check "a simulation is nine lines" eval "quiet && [ $(wc -l <"$work/out") -eq 9 ] && said '^policy          lfu:half-life=' out && said '^windows         100$' out &&
    said '^requests        $(number "$work/trace.stats" requests)$' out && said '^hits            $(number "$work/trace.stats" hits)$' out &&
    said '^hit rate        [0-9]+\.[0-9][0-9] %$' out && said '^swaps           $(number "$work/trace.stats" swaps)$' out &&
    said '^bytes copied    $(number "$work/trace.stats" swap_bytes) \([0-9.]+ [KM]B\)$' out && said '^Belady.s bound  [0-9]+ hits \([0-9.]+ %\)$' out"
try sim --part 6,12,25,50 "$trace" --policy lfu --policy none
check "several policies and sizes are a table" eval "quiet && [ $(wc -l <"$work/out") -eq 10 ] && said '^100 windows, [0-9]+ requests, 384 experts; 96 swaps every 4 windows, used after 4$' out &&
    said '^policy +slots +part +hits +hit rate +swaps +copied +Belady$' out && [ $(grep -c '^lfu:' "$work/out") -eq 4 ] && [ $(grep -c '^none ' "$work/out") -eq 4 ]"
cp "$work/out" "$work/table"
for part in 6 12 25 50; do
    try sim "$trace" --part $part --policy none
    row=$(sed -nE 's/^hits +//p' "$work/out")
    check "the table's hits at $part % are those of a simulation alone" eval "grep -qE '^none .* $row +[0-9.]+ % +0 +0 B ' $work/table"
done
try sim "$trace" --part 6,12 --json
check "as JSON it is a line each" eval "quiet && [ $(wc -l <"$work/out") -eq 2 ] && said '^\{.*\"slots\":23,.*\}$' out && said '^\{.*\"slots\":46,.*\}$' out"
for slots in 0 1 7 96 383 384; do
    try sim "$trace" --slots $slots --json
    check "$slots slots are $slots slots" eval "quiet && [ $(number "$work/out" slots) -eq $slots ]"
done
check "all experts on the device hit always" [ "$(number "$work/out" hits)" -eq "$(number "$work/out" requests)" ]
check "Belady's bound then too" [ "$(number "$work/out" belady_hits)" -eq "$(number "$work/out" requests)" ]
try sim "$trace" --part 100 --json
check "100 % are all experts" [ "$(number "$work/out" slots)" -eq 384 ]
try sim "$trace" --swaps 0 --json
check "without swaps none are made" eval "quiet && [ $(number "$work/out" swaps) -eq 0 ] && [ $(number "$work/out" belady_hits) -gt $(number "$work/out" hits) ]"
try sim "$trace" --swap-period 6 --json
check "a period alone is the lag too" said '"swap_period":6,"swap_lag":6' out

try sim "$trace" --swap-lag 5
check "a lag beyond the recorded period is wrong usage" misused_with "swaps every 4 windows cannot be used after 5: wanted --swap-lag <= --swap-period"
try sim "$trace" --slots 96,385
check "more slots than experts are wrong usage" misused_with "--slots 385: the model has 384 experts"

# ---- Wrong files ----------------------------------------------------------------------------------------------------------------------

try sim "$work/none"
check "a missing trace is named" failed_with "trace $work/none: cannot open: No such file or directory"
try sim "$work"
check "a folder is no trace" failed_with "$work is not a trace: it is a directory"
try sim "$model"
check "a model is no trace" failed_with "$model is not a trace: it does not begin with STRATATR"
try sim "$trace" --profile "$work/none"
check "a missing profile is named" failed_with "profile $work/none: cannot open: No such file or directory"
try sim "$trace" --profile "$trace"
check "a trace is no profile" failed_with "$trace is not a profile: it does not begin with STRATAPR"

# PLACE BYTE: in a copy of the trace.
changed() {
    cp "$trace" "$work/changed"
    printf '%b' "$2" | dd of="$work/changed" bs=1 seek="$1" conv=notrunc status=none
}
changed 8 '\002'
try sim "$work/changed"
check "another version is refused" failed_with "trace $work/changed has version 2, this program reads 1"
changed 40 '\377'
try sim "$work/changed"
check "a changed header is refused" failed_with "trace $work/changed is damaged: its header differs from the header's hash"
changed $((96 + 64 + 5000)) '\252\125'
try sim "$work/changed"
check "a damaged window is named" failed_with "trace $work/changed is damaged: window [0-9]+ \(at byte [0-9]+\) differs from its sum"
cp "$trace" "$work/changed"
truncate -s -1 "$work/changed"
try sim "$work/changed"
check "a trace that is cut short is simulated as far as it goes, and this is said" \
    eval "exited 0 && said '^windows         99$' out && [ $(wc -l <"$work/err") -eq 1 ] && said '^strata: $work/changed ends in the middle of a window, which is left out$' err"
try sim "$work/changed" --json
check "also in JSON" said '"windows":99,.*"cut":true\}$' out

# ---- Disks that fail, runs that are killed --------------------------------------------------------------------------------------------

for n in 1 2 3 50; do
    fault="STRATA_FAULT_READ=eio:$n"
    try sim "$trace"
    check "read $n fails: a sentence" failed_with "$trace: cannot read [0-9]+ bytes at [0-9]+: Input/output error"
    fault="STRATA_FAULT_READ=short:$n"
    check "read $n is short: it goes on" repeats trace
done
fault=
try sim "$trace" --json
cp "$work/out" "$work/whole"
# The header is write 1, a window each of the others.
for n in 2 3 40; do
    fault="STRATA_FAULT_WRITE=full:$n"
    try "${run[@]}" -n 60 --trace "$work/full"
    fault=
    check "a disk that is full at write $n is named at the end of the run" eval "exited 1 && said '^strata: trace $work/full: cannot write window $((n - 2)): No space left on device$' err"
    try sim "$work/full" --json
    check "and the windows before can be simulated" eval "quiet && [ $(number "$work/out" windows) -eq $((n - 2)) ]"
    fault="STRATA_FAULT_WRITE=kill:$n"
    try "${run[@]}" -n 60 --trace "$work/killed"
    fault=
    check "a run is killed at write $n" exited 137
    try sim "$work/killed" --json
    check "the windows before can be simulated" eval "quiet && [ $(number "$work/out" windows) -eq $((n - 2)) ]"
done
for n in 1 5; do
    fault="STRATA_FAULT_WRITE=short:$n"
    try "${run[@]}" -n 100 --sim-vram 3M --trace "$work/short"
    fault=
    check "write $n is short: the trace is the same" cmp -s "$work/short" "$trace"
done
try "${run[@]}" -n 1 --trace "$work/no/folder"
check "a place that cannot be written is named before the run" failed_with "trace $work/no/folder: cannot create: No such file or directory"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
