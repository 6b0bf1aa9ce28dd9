#!/usr/bin/env bash
# Installs what Strata needs on Debian and Ubuntu; says nothing and does nothing when it is all there.
#
#     tools/deps.sh build     compiler and libraries
#     tools/deps.sh test      those, cmocka, and Node for the scripts in tests/node (which are skipped without it)
#     tools/deps.sh fuzz      those, and clang with its runtime for tests/fuzz.sh
#
# A thing is looked for by what it provides (a pkg-config module, a header, a command), so a library built by hand counts too.
set -u

goal=${1:-build}
case $goal in
build | test | fuzz) ;;
*)
    echo "usage: tools/deps.sh build|test|fuzz" >&2
    exit 2
    ;;
esac

required=() optional=()
need() { # PACKAGE REASON
    required+=("$1")
    echo "missing: $1 ($2)"
}
has() { command -v "$1" >/dev/null 2>&1; }
need_module() { # MODULE PACKAGE REASON
    pkg-config --exists "$1" 2>/dev/null || need "$2" "$3"
}

has cc || need gcc "the C compiler"
[ -e /usr/include/stdio.h ] || need libc6-dev "the C library's headers"
has make || need make "runs the build"
has pkg-config || need pkg-config "finds the libraries"
need_module jansson libjansson-dev "JSON"
need_module libpcre2-8 libpcre2-dev "regular expressions of the tokenizer"
need_module libutf8proc libutf8proc-dev "Unicode normalisation"
need_module libxxhash libxxhash-dev "hashes"
need_module hwloc libhwloc-dev "cores and caches of this machine"
[ "$goal" = build ] || need_module cmocka libcmocka-dev "the test framework"
if [ "$goal" = test ]; then
    has node || optional+=(nodejs)
    has npm || optional+=(npm)
elif [ "$goal" = fuzz ] && ! has clang; then
    need clang "libFuzzer"
elif [ "$goal" = fuzz ] && [ ! -e "$(clang -print-file-name="libclang_rt.fuzzer-$(uname -m).a")" ]; then
    version=$(clang -dumpversion)
    need "libclang-rt-${version%%.*}-dev" "libFuzzer's and the sanitizers' runtime"
fi

[ ${#required[@]} -eq 0 ] && [ ${#optional[@]} -eq 0 ] && exit 0

# Without the optional packages the test runner skips what needs them and says so; without a required one this is the end.
give_up() {
    [ ${#required[@]} -eq 0 ] && exit 0
    echo "$1: ${required[*]}" >&2
    exit 1
}
has apt-get || give_up "tools/deps.sh installs with apt-get only (Debian 12, Ubuntu 24.04). Please install your system's packages of"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo)
    [ -t 0 ] || as_root=(sudo -n) # nobody there to type a password
    { has sudo && "${as_root[@]}" true; } || give_up "Installing needs root. Please install with 'sudo apt-get install'"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt_get() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "$@" >"$log" 2>&1; }
install() { # the package lists may be absent (a fresh container) or outdated
    echo "installing: $*"
    apt_get install -y --no-install-recommends "$@" ||
        { apt_get update && apt_get install -y --no-install-recommends "$@"; }
}

if [ ${#required[@]} -gt 0 ] && ! install "${required[@]}"; then
    tail -n 20 "$log" >&2
    give_up "apt-get could not install"
fi
if [ ${#optional[@]} -gt 0 ] && ! install "${optional[@]}"; then
    echo "apt-get could not install ${optional[*]}: the scripts in tests/node will be skipped"
fi
if [[ $goal = fuzz && " ${required[*]-} " = *" clang "* ]]; then
    exec "$0" fuzz # the runtime is named after the version that has just come
fi
exit 0
