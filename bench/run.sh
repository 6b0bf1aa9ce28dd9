#!/usr/bin/env bash
# make bench: what the speed bars of this project are read off. Ratios within one run; the machine may be shared and noisy.
#
#     bench/run.sh BUILD
#
# 1. products with weight matrices beside a plain read of the same bytes, per instruction set
# 2. decoding both pebble files, and synthetic models of real layer shapes, beside llama.cpp where tools/oracle/peer.sh can build
#    its counterpart (needs the npm packages of tests/node and llama.cpp's headers)
# 3. the cpu lane beside a plain read, what an empty layer costs, and the share of the link that the controller chooses beside every fixed one
set -u
cd "$(dirname "$0")/.." || exit 1
build=${1:?usage: bench/run.sh BUILD}
strata=$build/strata threads=$(nproc)
work=${STRATA_BENCH_DIR:-$build/bench-models}
mkdir -p "$work"

for isa in avx512 avx2; do
    "$build/tools/checkops" --bench --isa "$isa" --threads "$threads"
    echo
done

peer=$build/llama_peer
[ -x "$peer" ] || tools/oracle/peer.sh "$build" || echo "SKIPPED: llama.cpp beside it: tools/oracle/peer.sh could not build the peer"

# Alternates the two programs, so that a noisy neighbour hits both; prints medians of the decoding speeds and their ratio.
median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
compare() { # NAME MODEL PROMPT TOKENS ROUNDS
    local name=$1 model=$2 prompt=$3 tokens=$4 rounds=$5 ours=() theirs=()
    for ((i = 0; i < rounds; i++)); do
        ours+=("$("$strata" bench -m "$model" -p "$prompt" -n "$tokens" -r 1 --threads "$threads" 2>/dev/null | sed -nE 's/.*decode [0-9]+ tokens ([0-9.]+) tok.*/\1/p')")
        [ -x "$peer" ] && theirs+=("$("$peer" bench "$model" "$threads" "$prompt" "$tokens" 2>/dev/null | sed -nE 's/.*decode [^0-9]*[0-9]* ?t?o?k?e?n?s? ?([0-9.]+) tok.*/\1/p' | tail -n 1)")
    done
    local a b=-
    case " ${ours[*]} ${theirs[*]-x} " in *"  "*)
        echo "$name: a program gave no figure" >&2
        exit 1
        ;;
    esac
    a=$(printf '%s\n' "${ours[@]}" | median)
    [ ${#theirs[@]} -gt 0 ] && b=$(printf '%s\n' "${theirs[@]}" | median)
    echo "$a $b" | awk -v name="$name" '{ printf "%-28s decode: strata %8.1f tok/s, llama.cpp %8s tok/s%s\n", name, $1, $2, ($2 > 0 ? sprintf(", ratio %.2f", $1 / $2) : "") }'
}

echo "decoding, $threads threads, medians"
compare pebble.gguf models/pebble/pebble.gguf 32 128 5
compare pebble-iq3.gguf models/pebble/pebble-iq3.gguf 32 128 5
for experts in Q2_0 IQ3_S; do
    model=$work/synth-4-layers-$experts.gguf
    [ -e "$model" ] || "$strata" synth --like qwen3.8-flash-next --layers 4 --dense Q8_0 --experts "$experts" "$model" || exit 1
    compare "synthetic $experts" "$model" 8 24 5
done

"$build/bench/experts" "$threads" && "$build/bench/pool" "$threads" && bash bench/split.sh "$strata" "$work/synth-4-layers-Q2_0.gguf"
