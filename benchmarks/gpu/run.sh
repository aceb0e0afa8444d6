#!/usr/bin/env bash
# Runs the tests and benchmarks of the CUDA kernels on a machine with a GPU: run.sh [tests] [sanitizer] [bench] [torch]
#
# It is part of the directory that `cargo xtask gpu` creates, and otherwise needs only a driver. Without arguments it
# runs all four parts; compute-sanitizer and torch are used if they are installed. Results are written to results/.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p results
parts=("${@:-all}")
failed=0

wanted() {
    [[ ${parts[0]} == all || " ${parts[*]} " == *" $1 "* ]]
}

# Runs a command and copies its output to results/$1.
note() {
    local log=results/$1
    shift
    echo "\$ $*"
    "$@" 2>&1 | tee "$log"
    local status=${PIPESTATUS[0]}
    ((status == 0)) || { echo "FAILED ($status): see $log"; failed=$((failed + 1)); }
}

# Use the precompiled images, even if a compiler of a different version is installed. A compiler that is found, for
# example among torch's packages, compiles only missing images.
export QUANT_CUDA_CACHE=$PWD/images
if [[ -z ${QUANT_NVRTC:-} ]] && command -v python3 >/dev/null; then
    nvrtc=$(python3 - <<'PYTHON'
import glob, sysconfig
places = [sysconfig.get_path("purelib") + "/nvidia/*/lib", "/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib"]
found = [f for place in places for f in sorted(glob.glob(place + "/libnvrtc.so.1[23]"))]
print(found[-1] if found else "")
PYTHON
    )
    [[ -n $nvrtc ]] && export QUANT_NVRTC=$nvrtc && echo "compiler: $nvrtc"
fi
# The test `device` compiles kernels for the device that it finds, so it needs NVRTC.
lacks_compiler() {
    [[ $1 == device && -z ${QUANT_NVRTC:-} ]] && ! ldconfig -p 2>/dev/null | grep -q libnvrtc &&
        echo "SKIPPED: the test $1 needs NVRTC, which is not installed"
}
command -v nvidia-smi >/dev/null && note device.txt nvidia-smi

# Runs a test in its own process, because a fault on the device makes later calls of the process fail too.
one_test() {
    local name=$1 test=$2 log=results/tests/$1-${2//::/-}.txt
    if QUANT_GPU=1 timeout "$TEST_SECONDS" "./tests/$name" --exact "$test" --nocapture >"$log" 2>&1; then
        echo "ok      $name $test"
    else
        echo "FAILED  $name $test ($?): see $log"
    fi
}
export -f one_test
export TEST_SECONDS=${TEST_SECONDS:-300}

if wanted tests; then
    mkdir -p results/tests
    while read -r name skips; do
        lacks_compiler "$name" >&2 && continue
        arguments=()
        for skip in $skips; do arguments+=(--skip "$skip"); done
        "./tests/$name" --list --format terse "${arguments[@]}" | sed -n "s/\(.*\): test\$/$name \1/p"
    done <tests/list.txt |
        xargs -P "$(nproc)" -L 1 bash -c 'one_test "$@"' one_test | tee results/tests.txt
    failed=$((failed + $(grep -c ^FAILED results/tests.txt)))
    grep -q ^ok results/tests.txt || { echo "FAILED: no test ran" && failed=$((failed + 1)); }
fi

if wanted sanitizer; then
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck initcheck synccheck; do
            while read -r name test; do
                lacks_compiler "$name" && continue
                QUANT_GPU=1 note "sanitizer-$tool-$name-${test##*::}.txt" \
                    compute-sanitizer --tool "$tool" --error-exitcode 9 "./tests/$name" --test-threads 1 --exact "$test"
            done <tests/sanitized.txt
        done
    else
        echo "SKIPPED: compute-sanitizer is not installed"
    fi
fi

wanted bench && note bench.txt ./quant bench kernels --device cuda --json=results/bench.json

if wanted torch; then
    if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        note torch.txt python3 bench_torch.py results/bench.json results/torch.jsonl
    else
        echo "SKIPPED: torch with CUDA is not installed"
    fi
fi

if ((failed)); then
    echo "$failed command(s) failed"
    exit 1
fi
echo "everything that was run passed; the results are in results/"
