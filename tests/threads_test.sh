#!/usr/bin/env bash
# threads: twenty short runs on the sim device, each with other options, give the CPU's hashes; built with ThreadSanitizer none reports.
#
#     tests/threads_test.sh STRATA
set -u
strata=${1:?usage: tests/threads_test.sh STRATA}
model=models/pebble/pebble.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

try() { # OUT OPTIONS...
    local out=$1
    shift
    timeout -k 2 200 "$strata" run -m "$model" -p "The sea was calm that" -n 4 --temp 0 --hash=layers -q "$@" >"$work/$out" 2>"$work/err" </dev/null
}

if ! try cpu --threads 1 || ! [ -s "$work/cpu" ]; then
    cat "$work/err"
    echo "0 passed, 1 failed"
    exit 1
fi

policies=(lfu lru none lfru stale lfu:half-life=4,hysteresis=0.1)
sizes=(0 28K 1M 5M 64M) # none, one expert, a tenth, half, all
shares=(0 64 128 256 "") # "": chosen
for ((i = 0; i < 20; i++)); do
    options=(--device sim --sim-delay $((50 + 10 * i)) --sim-vram "${sizes[i % 5]}" --policy "${policies[i % 6]}" --threads $((1 + i % 3))
             --window $((1 + i % 8)) --swap-period $((1 + i % 3)) --swaps $((1 + 31 * (i % 4))))
    [ -z "${shares[i % 5 * 2 % 5]}" ] || options+=(--link-share "${shares[i % 5 * 2 % 5]}")
    if try sim "${options[@]}" && cmp -s "$work/cpu" "$work/sim"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: ${options[*]}"
        diff "$work/cpu" "$work/sim" | head -n 4
        head -n 60 "$work/err"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
