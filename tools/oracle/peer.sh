#!/usr/bin/env bash
# Builds BUILD/llama_peer from llama.cpp's prebuilt library and headers in two npm packages of one version.
#
#     npm install --ignore-scripts node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1
#     tools/oracle/peer.sh node_modules [BUILD]
#     tools/oracle/peer.sh BUILD                 the same for BUILD/node_modules
#
# The first package carries llama.cpp's source as a git bundle (the headers come out of it), the second one the library.
set -eu

given=$(cd "${1:?usage: tools/oracle/peer.sh NODE_MODULES [BUILD], or BUILD with node_modules in it}" && pwd)
cd "$(dirname "$0")/../.."
if [ "${given##*/}" = node_modules ]; then
    modules=$given build=${2:-build}
else
    modules=$given/node_modules build=$given
fi
library=$modules/@node-llama-cpp/linux-x64/bins/linux-x64
bundle=$modules/node-llama-cpp/llama/gitRelease.bundle

version() { sed -nE 's/^ *"version": "([^"]*)".*/\1/p' "$1/package.json" | head -n 1; }

for there in "$library" "$bundle"; do
    if [ ! -e "$there" ]; then
        echo "peer.sh: $there is missing; wanted the packages node-llama-cpp and @node-llama-cpp/linux-x64" >&2
        exit 1
    fi
done
ours=$(version "$modules/node-llama-cpp") theirs=$(version "$modules/@node-llama-cpp/linux-x64")
if [ "$ours" != "$theirs" ]; then # structs are passed by value: headers of another version would corrupt memory
    echo "peer.sh: node-llama-cpp is $ours and @node-llama-cpp/linux-x64 is $theirs; wanted one version" >&2
    exit 1
fi

source=$build/llama-headers-$ours
if [ ! -e "$source/include/llama.h" ]; then
    rm -rf "$source"
    mkdir -p "$build"
    git clone --quiet --no-checkout "$bundle" "$source"
    git -C "$source" checkout --quiet HEAD -- include ggml/include
fi

# The libraries' names carry a version; the first match of each is the one.
libraries=()
for name in libllama libggml libggml-base; do
    for file in "$library/$name.so" "$library/$name".*.so; do
        [ -e "$file" ] && libraries+=("$file") && break
    done
done
${CC:-cc} -std=gnu11 -O2 -g -D_GNU_SOURCE -Wall -Wextra -Wshadow -Werror -isystem "$source/include" -isystem "$source/ggml/include" \
    -o "$build/llama_peer" tools/oracle/llama_peer.c "${libraries[@]}" -Wl,-rpath,"$library" -ldl
echo "$build/llama_peer"
