#!/usr/bin/env bash
# Packs as their users meet them: the same answers with and without, wrong packs, disks that fail or fill up, runs that are killed.
#
#     tests/pack_test.sh STRATA
#
# Faults come from tests/fault_shim.c, built beside the tests.
set -u
strata=${1:?usage: tests/pack_test.sh STRATA}
shim=$(cd "$(dirname "$strata")" && pwd)/tests/fault_shim.so
model=models/pebble/pebble.gguf
other=models/pebble/pebble-iq3.gguf
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

if [ ! -e "$shim" ]; then
    code=0
    : >"$work/out"
    echo "make ${shim#"$PWD"/}" >"$work/err"
    fail "the library that makes faults is there"
fi

# ---- Help and wrong usage -------------------------------------------------------------------------------------------------------------

try pack --help
check "'strata pack --help' explains it" eval "exited 0 && said '^Usage: strata pack' out && [ ! -s $work/err ]"
try --help
check "'strata --help' lists it" said '^  pack ' out
while IFS='|' read -r sentence line; do
    # shellcheck disable=SC2086 # words
    try $line
    check "wrong usage: strata $line" misused_with "$sentence"
done <<'CASES'
wanted the model to read and the file to write|pack
wanted the model to read and the file to write|pack a
wanted the model to read and the file to write|pack a b c
wrong option|pack a b --colour
--threads 0: wanted a whole number from 1|pack a b --threads 0
CASES

# ---- The same answers -----------------------------------------------------------------------------------------------------------------

prompt="One morning the old captain"
for name in pebble pebble-iq3; do
    file=models/pebble/$name.gguf
    try pack "$file" "$work/$name.pack"
    check "packing $name says what to do with it" eval "exited 0 && [ ! -s $work/out ] && said '^$work/$name.pack: [0-9.]+ MB in [0-9.]+ s' err &&
        said '^  strata run -m $file --pack $work/$name.pack$' err && said '^  strata run -m $file --pack $work/$name.pack --verify$' err"
    check "nothing else is left" [ ! -e "$work/$name.pack.part" ]
    hashes=(run -m "$file" -q -n 8 --temp 0 -p "$prompt" --hash=layers)
    try "${hashes[@]}"
    cp "$work/out" "$work/$name.hashes"
    check "$name has hashes" eval "exited 0 && [ $(wc -l <"$work/out") -eq 13 ]"
    for options in "" "--verify" "--threads 1" "--ignore-memory"; do
        # shellcheck disable=SC2086
        try "${hashes[@]}" --pack "$work/$name.pack" $options
        check "the same hashes with the pack $options" eval "exited 0 && cmp -s $work/out $work/$name.hashes"
    done
    try pack -q --threads 1 "$file" "$work/again.pack"
    check "a quiet pack says nothing" eval "exited 0 && [ ! -s $work/out ] && [ ! -s $work/err ]"
    check "one thread writes the same bytes" cmp -s "$work/again.pack" "$work/$name.pack"
    rm -f "$work/again.pack"
done
pack=$work/pebble.pack
hashes=(run -m "$model" -q -n 8 --temp 0 -p "$prompt" --hash=layers)

# ---- Wrong packs ----------------------------------------------------------------------------------------------------------------------

try "${hashes[@]}" --verify
check "--verify alone is refused" failed_with "--verify needs --pack: a GGUF file has no hashes to compare with"
try "${hashes[@]}" --pack "$work/pebble-iq3.pack"
check "the pack of another model is refused" failed_with "pack $work/pebble-iq3.pack was made from another model file than $model: make it again with 'strata pack'"
try run -m "$other" -q -n 1 -p a --pack "$pack"
check "also the other way round" failed_with "was made from another model file than $other"
try "${hashes[@]}" --pack "$work/none"
check "a missing pack is named" failed_with "pack $work/none: cannot open: No such file or directory"
try "${hashes[@]}" --pack "$model"
check "a model is no pack" failed_with "$model is not a pack: it does not begin with STRATAPK"
try "${hashes[@]}" --pack "$work"
check "a folder is no pack" failed_with "$work is not a pack: it is a directory"

# PLACE BYTE: in a copy of the pack.
changed() {
    cp "$pack" "$work/changed"
    printf '%b' "$2" | dd of="$work/changed" bs=1 seek="$1" conv=notrunc status=none
}
changed 8 '\002'
try "${hashes[@]}" --pack "$work/changed"
check "another version is refused" failed_with "pack $work/changed has version 2.1, this program reads 1.1: make it again with 'strata pack'"
changed 70 '\377'
try "${hashes[@]}" --pack "$work/changed"
check "a changed header is refused" failed_with "pack $work/changed is damaged: its header differs from the header's hash"
changed $((4096 + 3 * 1327104 + 100000)) '\252\125\252\125'
try "${hashes[@]}" --pack "$work/changed" --verify
check "--verify names the damaged layer" failed_with "layer 3 of pack $work/changed is damaged: its hash is [0-9a-f]{16}, wanted [0-9a-f]{16}"
cp "$pack" "$work/changed"
for size in $(($(wc -c <"$pack") - 1)) 5000000 4096 4095 576 575 64 63 16 8 7 1 0; do
    truncate -s "$size" "$work/changed"
    try "${hashes[@]}" --pack "$work/changed"
    check "a pack of $size bytes is refused" failed_with "$work/changed is (cut short: it has $size bytes|not a pack)"
done
rm -f "$work/changed"

# ---- The model is never written over --------------------------------------------------------------------------------------------------

cp "$model" "$work/model.gguf"
try pack "$work/model.gguf" "$work/./model.gguf"
check "pack refuses its own model as output" failed_with "$work/./model.gguf is a file of the model itself"
check "and leaves it as it was" cmp -s "$work/model.gguf" "$model"
rm -f "$work/model.gguf"
for place in "$work/no/folder.pack" /proc/strata.pack; do
    try pack "$model" "$place"
    check "a place that cannot be written is named: $place" failed_with "$place.part: cannot create: "
done
try pack "$work/none.gguf" "$work/new.pack"
check "a missing model is named" failed_with "$work/none.gguf: cannot open"
try pack tests/pack_test.sh "$work/new.pack"
check "a script is no model" failed_with "tests/pack_test.sh: not a GGUF file"

# ---- Disks that fail ------------------------------------------------------------------------------------------------------------------

nothing_left() { [ ! -e "$work/new.pack" ] && [ ! -e "$work/new.pack.part" ]; }
# KIND SENTENCE COMMAND...: at each of some reads, all of which the command gets to.
reads_fail() {
    local kind=$1 sentence=$2 n
    shift 2
    for n in 1 2 3 10 50 75 100 150; do
        fault="STRATA_FAULT_READ=$kind:$n"
        try "$@"
        check "read $n of strata $1: $kind" eval "failed_with '$sentence' && nothing_left"
    done
    fault=
}
short_reads() { # WHAT COMMAND...: change nothing
    local n
    for n in 1 2 3 10 50 75 100 150 200 250; do
        fault="STRATA_FAULT_READ=short:$n"
        try "${@:2}"
        check "read $n of strata $2: short" eval "exited 0 && $1"
    done
    fault=
}
reads_fail eio 'Input/output error' "${hashes[@]}"
reads_fail end '(became shorter while it was open: nothing at byte|the file became shorter)' "${hashes[@]}"
short_reads "cmp -s $work/out $work/pebble.hashes" "${hashes[@]}"
reads_fail eio 'Input/output error' "${hashes[@]}" --pack "$pack"
reads_fail end '(became shorter while it was open: nothing at byte|the file became shorter)' "${hashes[@]}" --pack "$pack"
short_reads "cmp -s $work/out $work/pebble.hashes" "${hashes[@]}" --pack "$pack" --verify
reads_fail eio 'Input/output error' pack "$model" "$work/new.pack"
reads_fail end '(became shorter while it was open: nothing at byte|the file became shorter)' pack "$model" "$work/new.pack"
short_reads "cmp -s $work/new.pack $pack" pack -q "$model" "$work/new.pack"
rm -f "$work/new.pack"

# Eight layers of one piece each, and the header.
for n in 1 2 3 4 5 6 7 8 9; do
    fault="STRATA_FAULT_WRITE=full:$n"
    try pack "$model" "$work/new.pack"
    check "a disk that is full at write $n is named" eval "failed_with '$work/new.pack.part: the pack needs 10.6 MB, the disk has [0-9.]+ [MG]B for it: No space left on device' && nothing_left"
    fault="STRATA_FAULT_WRITE=eio:$n"
    try pack "$model" "$work/new.pack"
    check "write $n fails: a sentence" eval "failed_with '$work/new.pack.part: cannot write: Input/output error' && nothing_left"
    fault="STRATA_FAULT_WRITE=short:$n"
    try pack -q "$model" "$work/new.pack"
    check "write $n is short: it goes on" eval "exited 0 && cmp -s $work/new.pack $pack"
    rm -f "$work/new.pack"
done
fault=

# ---- Runs that are killed or stopped --------------------------------------------------------------------------------------------------

absent_or_whole() { [ ! -e "$work/new.pack" ] || cmp -s "$work/new.pack" "$pack"; }
repaired() { # the next run replaces what is left
    try pack -q "$model" "$work/new.pack"
    exited 0 && cmp -s "$work/new.pack" "$pack" && [ ! -e "$work/new.pack.part" ]
}
for n in 1 2 5 8 9; do
    fault="STRATA_FAULT_WRITE=kill:$n"
    try pack "$model" "$work/new.pack"
    fault=
    check "killed at write $n: only the .part is left" eval "[ $code -eq 137 ] && [ ! -e $work/new.pack ] && [ -e $work/new.pack.part ]"
    check "killed at write $n: the .part is no pack" eval "try run -m $model -q -n 1 -p a --pack $work/new.pack.part; failed_with 'new.pack.part is (not a pack|cut short)'"
    check "killed at write $n: the next run replaces it" repaired
    rm -f "$work/new.pack"
done

# After a random part of the time that it takes with 2 ms for every read and write: about 0.25 s.
for i in 1 2 3 4 5 6 7 8 9 10; do
    after=$(awk -v r=$RANDOM -v s=$slower 'BEGIN { printf "%.3f", 0.01 + 0.5 * s * r / 32768 }')
    for signal in KILL INT; do
        LD_PRELOAD=$shim STRATA_FAULT_SLOW=2000 timeout --foreground --preserve-status -s $signal "$after" "$strata" pack -q "$model" "$work/new.pack" \
            >"$work/out" 2>"$work/err" </dev/null
        code=$?
        check "SIG$signal after $after s: the name is absent or whole" absent_or_whole
        if [ $signal = INT ]; then
            check "SIGINT after $after s leaves no .part and ends with 0 or 130" eval "[ ! -e $work/new.pack.part ] && { exited 130 && [ ! -s $work/err ] || exited 0; }"
        fi
        rm -f "$work/new.pack"
    done
done
check "after all of them a run makes a whole pack" repaired

# An older pack stays what it is until the new one is whole.
cp "$work/pebble-iq3.pack" "$work/new.pack"
fault="STRATA_FAULT_WRITE=kill:5"
try pack "$model" "$work/new.pack"
fault=
check "a killed run leaves the older pack as it was" cmp -s "$work/new.pack" "$work/pebble-iq3.pack"
check "and the next one replaces it" repaired

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
