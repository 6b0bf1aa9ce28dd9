#!/usr/bin/env bash
# The command line as its users meet it: texts, exit codes, sentences, interruptions, wrong files.
#
#     tests/cli_test.sh STRATA
set -u
strata=${1:?usage: tests/cli_test.sh STRATA}
model=models/pebble/pebble.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
slower=1
[ -z "${STRATA_TEST_SANITIZER:-}" ] || slower=10 # of the time limits

# ---- How a test is written ------------------------------------------------------------------------------------------------------------

# Runs strata, stopped after 60 s; leaves code, $work/out and $work/err.
try() {
    timeout -k 2 $((60 * slower)) "$strata" "$@" >"$work/out" 2>"$work/err" </dev/null
    code=$?
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
wrote() { exited 0 && [ "$(cat "$work/out")" = "$1" ]; }

# ---- Help and wrong usage -------------------------------------------------------------------------------------------------------------

for command in run info bench convert quantize synth; do
    try $command --help
    check "'strata $command --help' explains it" eval "exited 0 && said '^Usage: strata $command' out && [ ! -s $work/err ]"
done
try --help
check "'strata --help' lists the commands" eval "exited 0 && said '^  quantize ' out"
try
check "no command is wrong usage" eval "exited 2 && said '^Usage: ' err"
try sing
check "an unknown command is named" misused_with "'sing' is not a command"

while IFS='|' read -r sentence line; do
    # shellcheck disable=SC2086 # words
    try $line
    check "wrong usage: strata $line" misused_with "$sentence"
done <<'CASES'
no model|run
no model|run -p hello
unexpected argument 'extra'|run -m x extra
-p and -f exclude each other|run -m x -p a -f b
wrong option|run -m x --colour
wrong option|run -m
-n -1: wanted a whole number from 0|run -m x -n -1
-n ten: wanted a whole number|run -m x -n ten
-n 5x: wanted a whole number|run -m x -n 5x
--temp -1: wanted a number from 0|run -m x --temp -1
--temp nan: wanted a number|run -m x --temp nan
--top-p 1.5: wanted a number from 0 to 1|run -m x --top-p 1.5
--seed 99999999999999999999: wanted a whole number|run -m x --seed 99999999999999999999
--threads 0: wanted a whole number from 1|run -m x --threads 0
--window 9: wanted a whole number from 1 to 8|run -m x --window 9
--kv f32: wanted f16 or int8|run -m x --kv f32
--hash=all: wanted --hash or --hash=layers|run -m x --hash=all
-c 0: wanted a whole number from 1|run -m x -c 0
no file|info
one file at a time|info a b
wrong option|info --colour a
no model|bench
-r 100: wanted a whole number from 1 to 99|bench -m x -r 100
wanted the file to read and the file to write|quantize a
wanted a type|quantize a b
--type Q9: not a type|quantize a b --type Q9
CASES

# ---- The same text in every way -------------------------------------------------------------------------------------------------------

prompt="One morning the old captain"
text=" came out of his room with the other and said:

\"Your honour is not the most unwholesome. I have been in my old days a man of a very great fortune,"
greedy=" was sitting on the bench, and the other was standing on the bench. The"

seeded=(run -m "$model" --seed 7 -n 40 -q)
try "${seeded[@]}" -p "$prompt"
check "a seed gives its text" wrote "$prompt$text"
cp "$work/out" "$work/text"
for option in "--threads 1" "--threads 2" "--window 1" "--window 8"; do
    # shellcheck disable=SC2086
    try "${seeded[@]}" -p "$prompt" $option
    check "the same text with $option" cmp -s "$work/out" "$work/text"
done
for isa in ref avx2 avx512; do
    STRATA_ISA=$isa try "${seeded[@]}" -p "$prompt"
    check "the same text with STRATA_ISA=$isa" cmp -s "$work/out" "$work/text"
done
try run -m "$model" --seed 8 -n 40 -q -p "$prompt"
check "another seed gives another text" eval "exited 0 && ! cmp -s $work/out $work/text"
for seed in 1 2; do
    try run -m "$model" --seed $seed --temp 0 -n 20 -q -p "$prompt"
    check "greedy text does not depend on the seed $seed" wrote "$prompt$greedy"
done

printf '%s' "$prompt" >"$work/prompt"
try "${seeded[@]}" -f "$work/prompt"
check "a prompt from a file is continued, not repeated" wrote "$text"
timeout 60 "$strata" "${seeded[@]}" <"$work/prompt" >"$work/out" 2>"$work/err"
code=$?
check "a prompt from stdin too" wrote "$text"
try "${seeded[@]}" -p ""
check "an empty prompt starts a text" eval "exited 0 && [ $(wc -c <"$work/out") -gt 10 ]"
try run -m "$model" -q -n 0 -p "$prompt"
check "-n 0 writes the prompt alone" wrote "$prompt"
try run -m "$model" -n 3 -p "$prompt" --seed 5
check "the statistics name the seed and the counts" eval "exited 0 && said 'prompt 5 tokens .*wrote 3 tokens' err && said 'peak memory [0-9]+ MB.* seed 5$' err"
try run -m "$model" -n 3 -p "<|im_start|>" --special
check "--special reads a control token as one" said 'prompt 1 tokens' err
try run -m "$model" -n 3 -p "<|im_start|>"
check "without --special it is ordinary text" eval "exited 0 && ! said 'prompt 1 tokens' err"
try run -m "$model" -q -f "$work/none"
check "a missing prompt file is named" failed_with "cannot read $work/none: No such file"
try run -m "$model" -q -f "$work"
check "a folder is no prompt file" failed_with "cannot read $work: Is a directory"

head -c 60000 tests/data/prose.txt >"$work/long"
while [ "$(wc -c <"$work/long")" -lt 400000 ]; do cat tests/data/prose.txt >>"$work/long"; done
try run -m "$model" -q -f "$work/long"
check "a prompt beyond the default context is counted" failed_with "the prompt has [0-9]+ tokens, the context takes 8192 \(-c\)"
try run -m "$model" -q -f "$work/long" -c 1000000
check "a prompt beyond the model's context is counted" failed_with "the prompt has [0-9]+ tokens, the context takes 32768 \(-c\)"
try run -m "$model" -q -p "$prompt" -c 4
check "a prompt beyond -c is counted" failed_with "the prompt has 5 tokens, the context takes 4 \(-c\)"
try run -m "$model" -p "$prompt" -c 9 --ignore-eos --seed 1
check "a text ends where the context is full" eval "exited 0 && said 'wrote 4 tokens' err"

# ---- Hashes ---------------------------------------------------------------------------------------------------------------------------

hashes=(run -m "$model" -q -n 5 --temp 0 -p "$prompt")
STRATA_ISA=avx2 try "${hashes[@]}" --hash
cp "$work/out" "$work/hashes"
check "--hash prints a line for every position" eval "exited 0 && [ $(grep -cE '^[0-9]+ [0-9a-f]{16}$' "$work/hashes") -eq 10 ]"
STRATA_ISA=ref try "${hashes[@]}" --hash
check "the hashes of two instruction sets are equal" cmp -s "$work/out" "$work/hashes"
try "${hashes[@]}" --hash=layers
check "--hash=layers adds one for each of 8 layers" eval "exited 0 && [ $(grep -cE '^[0-9]+( [0-9a-f]{16}){9}$' "$work/out") -eq 10 ]"
check "--hash=layers begins as --hash does" eval "cut -d' ' -f1,2 $work/out | cmp -s - $work/hashes"
try "${hashes[@]}" --hash --kv int8
check "another KV type has other hashes" eval "exited 0 && ! cmp -s $work/out $work/hashes"

# ---- Ctrl-C, and output that goes nowhere ---------------------------------------------------------------------------------------------

# SECONDS WHAT ARGUMENTS...: SIGINT after that time; 130 within 2 s of it. Before the program listens, the signal ends it with 130 as well.
interrupt() {
    local after=$1 what=$2
    shift 2
    timeout --preserve-status -s INT -k $((2 * slower)) "$after" "$strata" "$@" >"$work/out" 2>"$work/err" </dev/null
    code=$?
    check "Ctrl-C $what ends it with 130" eval "exited 130 && ! said '^strata: ' err"
}
for after in 0.01 0.03 0.06 0.1 0.2; do
    interrupt $after "after $after s" run -m "$model" -p "$prompt" --ignore-eos -c 32768
done
interrupt 1 "while decoding" run -m "$model" -p "$prompt" --ignore-eos -c 32768
interrupt 1 "while decoding quietly" run -m "$model" -p "$prompt" --ignore-eos -c 32768 -q
head -c 100000 "$work/long" >"$work/prompt"
STRATA_ISA=ref interrupt 1.5 "while reading the prompt" run -m "$model" -f "$work/prompt" -c 32768
STRATA_ISA=ref interrupt 1.5 "while reading the prompt quietly" run -m "$model" -f "$work/prompt" -c 32768 -q
STRATA_ISA=ref interrupt 1.5 "while hashing" run -m "$model" -f "$work/prompt" -c 32768 -q --hash
interrupt 1 "while measuring" bench -m "$model" -n 30000 -r 99
timeout --preserve-status -s INT -k 2 1 "$strata" run -m "$model" < <(sleep 5) >"$work/out" 2>"$work/err"
code=$?
check "Ctrl-C while waiting for stdin ends it with 130" eval "exited 130 && ! said '^strata: ' err"

start=$(date +%s)
timeout -k 2 $((30 * slower)) "$strata" run -m "$model" -q -p "$prompt" --ignore-eos 2>"$work/err" | head -c 10 >"$work/out"
code=${PIPESTATUS[0]}
check "a reader that goes away ends the text" eval "[ $code -eq 141 ] && [ $(($(date +%s) - start)) -lt $((10 * slower)) ]"
(trap '' PIPE && timeout -k 2 $((30 * slower)) "$strata" run -m "$model" -q -p "$prompt" --ignore-eos 2>"$work/err"; echo $? >"$work/code") | head -c 10 >"$work/out"
code=$(cat "$work/code")
check "also where SIGPIPE is ignored, with a sentence" eval "exited 1 && said '^strata: cannot write the output: Broken pipe' err"

full() { # ARGUMENTS...
    timeout -k 2 $((30 * slower)) "$strata" "$@" >/dev/full 2>"$work/err" </dev/null
    code=$?
    : >"$work/out"
    check "a full disk is a failure: strata $1" failed_with "cannot write the output: No space left on device"
}
if [ -e /dev/full ]; then
    full run -m "$model" -q -p "$prompt" --ignore-eos
    full run -m "$model" -q -p "$prompt" -n 5 --hash
    full info "$model"
    full info --help
    full --help
    full bench -m "$model" -p 1 -n 1 -r 1
fi
timeout -k 2 60 "$strata" info "$model" 2>"$work/err" >&-
code=$?
: >"$work/out"
check "a closed stdout is a failure" failed_with "cannot write the output: Bad file descriptor"
timeout -k 2 60 "$strata" quantize "$model" "$work/closed.gguf" --experts Q8_0 >&- 2>&-
code=$?
check "a closed stderr is not printed into the file" eval "exited 0 && '$strata' info $work/closed.gguf | grep -q '^Strata runs this file'"
rm -f "$work/closed.gguf"

# ---- Wrong files ----------------------------------------------------------------------------------------------------------------------

for command in "run -q -p a -m" "info" "bench -m"; do
    # shellcheck disable=SC2086
    for file in "$work/none" "$work" tests/cli_test.sh /dev/null; do
        try $command $file
        case $file in
        "$work/none") check "strata $command: a missing file is named" failed_with "$file: cannot open: No such file" ;;
        "$work") check "strata $command: a folder is no model" failed_with "$file: this is a directory, wanted a GGUF file" ;;
        /dev/null) check "strata $command: a device is no model" failed_with "$file: this is not a regular file, wanted a GGUF file" ;;
        *) check "strata $command: a script is no model" failed_with "$file: not a GGUF file: it starts with the bytes 23 21 2f 75" ;;
        esac
    done
done

# Cut short at every KB of the header (149 KB) and at some places behind it, from the end so that one copy serves.
cp "$model" "$work/cut.gguf"
bytes=$(wc -c <"$model")
sizes="$((bytes - 1)) $((bytes / 2)) 1048576"
for ((kb = 160; kb > 0; kb--)); do sizes+=" $((kb * 1024))"; done
sizes+=" 23 8 4 3 1 0"
wrong=0
for size in $sizes; do
    [ "$size" -lt "$bytes" ] || continue
    truncate -s "$size" "$work/cut.gguf" 2>/dev/null || head -c "$size" "$model" >"$work/cut.gguf"
    "$strata" run -q -p a -m "$work/cut.gguf" >"$work/out" 2>"$work/err" </dev/null
    code=$?
    line=$(cat "$work/err") # without a process for each of many
    [[ $code -eq 1 && $line == "strata: $work/cut.gguf: "* && $line != *$'\n'* && ! -s $work/out ]] || wrong="$size bytes"
    [ "$wrong" = 0 ] || break
done
check "a file cut short anywhere is refused in one line ($wrong)" [ "$wrong" = 0 ]
rm -f "$work/cut.gguf"

# A later file of a split model: split.no 1 of 2, no tensors.
{
    printf 'GGUF\3\0\0\0\0\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0'
    printf '\10\0\0\0\0\0\0\0split.no\4\0\0\0\1\0\0\0'
    printf '\13\0\0\0\0\0\0\0split.count\4\0\0\0\2\0\0\0'
    head -c 64 /dev/zero
} >"$work/m-00002-of-00002.gguf"
try run -q -p a -m "$work/m-00002-of-00002.gguf"
check "a later file names the first" failed_with "this is file 2 of 2 of a split model: open the first one, m-00001-of-00002.gguf"

# An architecture whose name would move a terminal's cursor.
{
    printf 'GGUF\3\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0'
    printf '\24\0\0\0\0\0\0\0general.architecture\10\0\0\0\6\0\0\0\0\0\0\0a\33[2Jb'
    head -c 64 /dev/zero
} >"$work/escape.gguf"
try run -q -p a -m "$work/escape.gguf"
check "a sentence passes no escape sequence on" failed_with "architecture 'a \[2Jb' is not supported"
try info "$work/escape.gguf"
check "info passes no escape sequence on" eval "exited 0 && ! grep -q $'\\033' $work/out && said '^Strata cannot run this file: architecture .a .2Jb. is not' out"

# ---- info, bench, quantize ------------------------------------------------------------------------------------------------------------

try info "$model" --tensors
while read -r line; do
    check "info says $line" said "$line" out
done <<'LINES'
^models/pebble/pebble.gguf: GGUF version 3, [0-9.]+ MB$
^  general.architecture = qwen4exp$
^  qwen4exp.block_count = 8$
^  tokenizer.ggml.tokens = \[!, ", .*4096 elements\]$
^[0-9]+ tensors, 0\.0[0-9]+ billion weights, [0-9.]+ MB$
^  F32 +[0-9]+ tensors +[0-9.]+ [KM]B  32\.00 bits a weight$
^  blk\.0\.ffn_gate_exps\.weight +[A-Z0-9_]+ +48 x 64 x 256 +[0-9.]+ KB$
^Strata runs this file\.$
LINES
check "info ends with 0" exited 0
try info "$model" --all
check "info --all shows whole arrays" eval "exited 0 && said 'tokenizer.ggml.tokens = .*<.im_start.>' out"

try bench -m "$model" -p 9 -n 3 -r 3
check "bench prints one line of figures" eval "exited 0 && said 'median of 3 runs: prompt 9 tokens [0-9.]+ tok/s, decode 3 tokens [0-9.]+ tok/s; peak memory' out && [ $(wc -l <"$work/out") -eq 1 ]"

try quantize "$model" "$work/q8.gguf" --experts Q8_0 --dense Q8_0
check "quantize says what it wrote" eval "exited 0 && said '^$work/q8.gguf: [0-9]+ tensors, [0-9.]+ MB' err"
try info "$work/q8.gguf" --tensors
check "the experts have the type that was asked for" said 'blk\.0\.ffn_gate_exps\.weight +Q8_0 ' out
check "the projections too" said 'blk\.0\.attn_qkv\.weight +Q8_0 ' out
check "the router stays F32" said 'blk\.0\.ffn_gate_inp\.weight +F32 ' out
check "what was written runs" said '^Strata runs this file' out
try run -m "$work/q8.gguf" -q -n 10 --temp 0 -p "$prompt"
check "and writes text" eval "exited 0 && [ $(wc -c <"$work/out") -gt 40 ]"
try quantize "$work/q8.gguf" "$work/f32.gguf" --type F32
try quantize "$work/f32.gguf" "$work/again.gguf" --experts Q8_0 --dense Q8_0
try run -m "$work/q8.gguf" -q -n 3 --temp 0 -p "$prompt" --hash
cp "$work/out" "$work/hashes"
try run -m "$work/again.gguf" -q -n 3 --temp 0 -p "$prompt" --hash
check "Q8_0 through F32 and back is the same model" cmp -s "$work/out" "$work/hashes"
rm -f "$work"/*.gguf

for place in "$work/no/folder.gguf" /proc/strata.gguf; do
    try quantize "$model" "$place" --type Q8_0
    check "a place that cannot be written is named: $place" failed_with "$place"
done
try quantize "$work/none.gguf" "$work/out.gguf" --type Q8_0
check "quantize names a missing file" failed_with "$work/none.gguf: cannot open"
interrupt 0.3 "while quantizing" quantize "$model" "$work/stopped.gguf" --type IQ3_S
check "and leaves nothing behind" eval "! ls $work | grep -q stopped"

# ---- The input is never written over ------------------------------------------------------------------------------------------------------

cp "$model" "$work/same.gguf"
"$strata" quantize "$work/same.gguf" "$work/./same.gguf" --type Q2_0 >"$work/out" 2>"$work/err"
check "quantize refuses its own input as output" [ $? -eq 1 ]
check "and leaves it as it was" cmp -s "$work/same.gguf" "$model"

# ---- Memory ---------------------------------------------------------------------------------------------------------------------------

# The state of 8192 tokens: 2 attention layers of 2 (keys, values) x 2 heads x 256 x 2 bytes, and the index keys of every 4 tokens
# (128 x 4 bytes): 2 x 8192 x (2048 + 128) = 36 MB if the context is full; the 6 delta layers' 6 x 6 x 128 x 128 x 4 bytes = 2.4 MB.
# This text is short, so 4 MB of it are written.
if [ -n "${STRATA_TEST_SANITIZER:-}" ]; then
    : # the sanitizer's own memory counts
else
    try run -m "$model" -n 20 -p "$prompt" --seed 1
    peak=$(sed -nE 's/.*peak memory ([0-9]+) MB.*/\1/p' "$work/err")
    limit=$((bytes * 115 / 100 / 1000000 + 64 + 4))
    check "weights are in memory once: at most $limit MB, found ${peak:-none}" [ "${peak:-999999}" -le "$limit" ]
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
