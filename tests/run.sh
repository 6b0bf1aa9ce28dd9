#!/usr/bin/env bash
# Builds and runs every test; the last line is "N passed, N failed" (and ", N skipped" where something was).
#
#     tests/run.sh BUILD [sanitizer|threads]
#
#   BUILD/tests/test_*     cmocka programs; counts are read off their report
#   BUILD/tools/checkops   every kernel against its definition; ends with "N passed, N failed"
#   tests/*_test.sh        scripts, called with the path of the strata program; each ends with its own "N passed, N failed"
#   tests/node/*.mjs       the same in JavaScript, called with BUILD; packages of tests/node/package.json go to BUILD/node_modules
#
# A program that crashes, runs longer than 300 s, reports nothing or contradicts its exit code is a failure. Its output is shown
# only then. In the modes sanitizer and threads (for a BUILD made with sanitizers) tests see STRATA_TEST_SANITIZER=1; the Node scripts and the tests
# with a line that begins "/* slow: " or "# slow: " are left out; in the mode threads only those with a line that begins "/* threads: "
# or "# threads: " run. What is skipped is named.
set -u
cd "$(dirname "$0")/.." || exit 1

build=${1:?usage: tests/run.sh BUILD [sanitizer|threads]}
mode=${2:-}
limit_s=300
unset CMOCKA_MESSAGE_OUTPUT CMOCKA_XML_FILE CMOCKA_TEST_FILTER
mkdir -p "$build" && build=$(cd "$build" && pwd) || exit 1
export STRATA_BUILD=$build STRATA_NODE_MODULES=$build/node_modules
if [ -n "$mode" ]; then
    export STRATA_TEST_SANITIZER=1 UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
fi

passed=0 failed=0 skipped=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

finish() {
    local line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line+=", $skipped skipped"
    echo "$line"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
    exit
}

skip() { # WHAT REASON
    echo "SKIPPED: $1: $2"
    skipped=$((skipped + 1))
}

# The sum of the first number in all output lines that match.
# shellcheck disable=SC2317 # called by name
sum_lines() { cat "$work/out" "$work/err" | sed -nE "s/^.*$1.*$/\\1/p" | awk '{ n += $1 } END { print n + 0 }'; }

# The counters set p, f, s to what the program says of itself, and a note if it says nothing.
# shellcheck disable=SC2317
count_cmocka() {
    local run
    run=$(sum_lines '\[==========\].* ([0-9]+) test\(s\) run')
    p=$(sum_lines '\[  PASSED  \] ([0-9]+) test')
    s=$(sum_lines '\[  SKIPPED \] ([0-9]+) test')
    f=$((run - p - s))
    if [ "$run" -eq 0 ]; then # it died on the way
        p=$(grep -c '^\[       OK \]' "$work/out") f=1 s=0
        note=" (ended without a report)"
    fi
}

# shellcheck disable=SC2317
count_script() {
    p=0 f=0 s=0
    if [[ $(tail -n 1 "$work/out") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed(,\ ([0-9]+)\ skipped)?$ ]]; then
        p=${BASH_REMATCH[1]} f=${BASH_REMATCH[2]} s=${BASH_REMATCH[4]:-0}
    else
        note=" (ended without a report)"
    fi
}

run() { # NAME COUNTER COMMAND...
    local name=$1 counter=$2 p f s code start seconds note=
    shift 2
    start=$(date +%s.%N)
    { timeout -k 5 "$limit_s" "$@" >"$work/out" 2>"$work/err" </dev/null; } 2>/dev/null # bash would announce a crash
    code=$?
    seconds=$(echo "$start $(date +%s.%N)" | awk '{ printf "%.1f", $2 - $1 }')
    "$counter"
    if [ "$code" -eq 124 ]; then
        note=" (stopped after $limit_s s)"
    elif [ "$code" -gt 128 ]; then
        note=" (killed by SIG$(kill -l $((code - 128))))"
    elif [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; then
        note=" (exit code $code)"
    elif [ -z "$note" ] && [ $((p + f + s)) -eq 0 ]; then
        note=" (no test in it)"
    fi
    [ -z "$note" ] || [ "$f" -gt 0 ] || f=1
    [ "$s" -eq 0 ] || note=", $s skipped$note"
    printf '%-32s %6s s  %d passed, %d failed%s\n' "$name" "$seconds" "$p" "$f" "$note"
    if [ "$f" -gt 0 ]; then
        grep -hvE '^\[( RUN     |       OK) \]' "$work/out" "$work/err" | tail -n 100 | sed 's/^/    /'
    elif [ "$s" -gt 0 ]; then
        grep -hE '^SKIPPED: |^\[  SKIPPED \] [^0-9]' "$work/out" | sed -E "s/^(\[  SKIPPED \]|SKIPPED:)/SKIPPED: $name:/"
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

is_slow() { [ -n "$mode" ] && grep -qE '^(/\*|#) slow: ' "$1"; }

if ! make --no-print-directory BUILD="$build" -j"$(nproc)" tests >"$work/make" 2>&1; then
    grep -m 40 -E "error: |undefined reference|[*]{3}" "$work/make" || tail -n 40 "$work/make"
    echo "the build failed"
    failed=1
    finish
fi

is_left_out() { [ "$mode" = threads ] && ! grep -qE '^(/\*|#) threads: ' "$1"; }

for source in tests/test_*.c; do
    if [ ! -e "$source" ] || is_left_out "$source"; then
        continue
    fi
    name=$(basename "$source" .c)
    if is_slow "$source"; then
        skip "$name" "slow, left out with sanitizers"
    else
        run "$name" count_cmocka "$build/tests/$name"
    fi
done

[ "$mode" = threads ] || run checkops count_script "$build/tools/checkops"

for script in tests/*_test.sh; do
    if [ ! -e "$script" ] || is_left_out "$script"; then
        continue
    fi
    if is_slow "$script"; then
        skip "$script" "slow, left out with sanitizers"
    else
        run "$(basename "$script")" count_script bash "$script" "$build/strata"
    fi
done

# Installs tests/node/package.json once for each of its versions.
node_packages() {
    local wanted=tests/node/package.json there=$build/node_modules/.strata-package.json
    cmp -s "$wanted" "$there" && return 0
    cp "$wanted" "$build/package.json" &&
        (cd "$build" && timeout -k 5 "$limit_s" npm install --no-audit --no-fund --no-package-lock --ignore-scripts --omit=optional) >"$work/npm" 2>&1 &&
        mkdir -p "$build/node_modules" && cp "$wanted" "$there"
}

if [ -n "$mode" ]; then
    skip tests/node "left out with sanitizers"
elif ! command -v node >/dev/null; then
    skip tests/node "there is no node"
elif ! command -v npm >/dev/null && ! cmp -s tests/node/package.json "$build/node_modules/.strata-package.json"; then
    skip tests/node "there is no npm to install their packages"
elif ! node_packages; then
    skip tests/node "npm could not install their packages: $(grep -m 1 -iE 'err' "$work/npm" || echo 'no answer')"
else
    for script in tests/node/*.mjs; do
        [ -e "$script" ] && run "$(basename "$script")" count_script node "$script" "$build"
    done
fi

finish
