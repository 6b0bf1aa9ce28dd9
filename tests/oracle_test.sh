#!/usr/bin/env bash
# slow: 2,000 tokens of a float32 model
# The first oracle: figures of unmodified transformers on the expanded weights of models/pebble/pebble.gguf (tests/data/oracle.bin;
# tools/oracle/README.md says how they were recorded). Prompts of 5 to 844 tokens, the long ones beyond the attention budget.
set -u
strata=${1:?usage: tests/oracle_test.sh STRATA}
compare=$(dirname "$strata")/tools/oracle_compare
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

check() { # SENTENCE COMMAND...
    local sentence=$1
    shift
    if "$@" >"$work/out" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $sentence"
        cat "$work/out"
    fi
}

check "pebble.gguf expands to float32" "$strata" quantize models/pebble/pebble.gguf "$work/f32.gguf" --type F32
check "its logits are those of transformers" "$compare" "$work/f32.gguf" tests/data/oracle.bin
# The comparison itself can fail: other weights (more coarsely quantized) are told apart.
check "another model's logits are told apart" bash -c "! '$compare' models/pebble/pebble-iq3.gguf tests/data/oracle.bin"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
