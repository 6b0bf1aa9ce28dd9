#!/usr/bin/env bash
# Runs every tests/fuzz_*.c under libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#     tests/fuzz.sh SECONDS [TARGET...]
#
# Inputs that reach new code stay in build-fuzz/corpus/TARGET for the next run, inputs that crash in build-fuzz/findings; to see one
# again: build-fuzz/tests/TARGET FILE. Seeds: tests/data/TARGET/* where that folder exists, and the bundled model's header for gguf.
set -u
cd "$(dirname "$0")/.." || exit 1

seconds=${1:-}
if ! [[ $seconds =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: tests/fuzz.sh SECONDS [TARGET...]" >&2
    exit 2
fi
shift
tools/deps.sh fuzz || exit 1

build="build-fuzz"
if [ $# -gt 0 ]; then
    targets=("$@")
else
    targets=(tests/fuzz_*.c)
    targets=("${targets[@]##*/}")
    targets=("${targets[@]%.c}")
fi
mkdir -p $build/findings
# Only the rooms that read hostile bytes. libFuzzer brings main, so it is linked into the targets alone; its instrumentation is
# everywhere.
if ! make --no-print-directory BUILD=$build CC=clang WERROR= LDFLAGS=-fsanitize=fuzzer \
    LIB_SRC="$(echo src/{base,gguf,quant,expert,text,sample,convert}/*.c)" \
    CFLAGS="-O1 -g -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" \
    -j"$(nproc)" "${targets[@]/#/$build/tests/}" >$build/log 2>&1; then
    grep -E "error: |undefined reference|[*]{3}" $build/log || tail -n 30 $build/log
    exit 1
fi

seed() { # TARGET FOLDER
    local model
    [ ! -d "tests/data/$1" ] || cp -n "tests/data/$1"/* "$2"
    case $1 in
    *gguf*)
        for model in models/pebble/*.gguf; do
            [ ! -e "$model" ] || head -c 160K "$model" >"$2/seed-$(basename "$model")"
        done
        ;;
    esac
}

bad=0
export UBSAN_OPTIONS=print_stacktrace=1
for target in "${targets[@]}"; do
    corpus=$build/corpus/$target
    mkdir -p "$corpus"
    seed "$target" "$corpus"
    if $build/tests/"$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$build/findings/$target-" "$corpus" >$build/log 2>&1; then
        runs=$(sed -nE 's/^stat::number_of_executed_units: *//p' $build/log)
        echo "$target: $seconds s, $runs runs, $(find "$corpus" -type f | wc -l) inputs kept, no finding"
    else
        bad=$((bad + 1))
        grep -vE '^#[0-9]+' $build/log | tail -n 60
        echo "$target: FOUND: $(sed -nE 's/.*Test unit written to //p' $build/log)"
    fi
done
echo "${#targets[@]} targets, $bad with findings"
[ "$bad" -eq 0 ]
