#!/usr/bin/env bash
# What to run first on a GPU, in this order, each part a limit of time: whether the kernels are right comes before how
# fast they are. Ends with the name of the first part that fails.
#
#   bash tests/gpu.sh                         # build backend right smoke: about five minutes
#   bash tests/gpu.sh every time              # every test but the sanitizers', the whole benchmark: 15 minutes
#   bash tests/gpu.sh memcheck racecheck synccheck
#
# DEVICE=cpu goes through the same commands without a GPU. What the benchmark measures is left in $OUT, or in
# benchmarks/results.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
out=${OUT:-benchmarks/results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} CROWDNAL_REQUIRE_NATIVE=1

tests() {  # tests SECONDS ARGUMENTS...: without a GPU there are none
    local seconds=$1 status=0
    shift
    timeout "$seconds" python -m pytest -q -n 0 -m "" "$@" || status=$?
    if [ "$status" = 5 ] && [ "$device" = cpu ]; then return 0; fi
    return "$status"
}
part() {
    case $1 in
        build)
            if [ "$device" = cpu ]; then export CROWDNAL_NO_CUDA=1; fi
            TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} timeout 500 python setup.py build_ext --inplace
            ;;
        backend)
            python -c "import crowdnal; print(crowdnal.backend()); assert crowdnal.backend()['$device'] == 'native'"
            ;;
        right)  # one kernel after the other, so that the first wrong one is told
            CUDA_LAUNCH_BLOCKING=1 tests 150 -x tests/cuda/test_cuda.py -k "native or op_equals_reference or bitwise"
            ;;
        smoke) timeout 150 python benchmarks/gpu.py --smoke --device "$device" --json "$out/gpu-smoke.json" ;;
        every) tests 500 tests/cuda -k "not sanitizer" ;;
        time) timeout 500 python benchmarks/gpu.py --device "$device" --json "$out/gpu.json" ;;
        memcheck | racecheck | synccheck)
            tests 500 tests/cuda/test_cuda_runtime.py -k "sanitizer and $1"
            ;;
        *) echo "unknown part $1" && return 2 ;;
    esac
}

if [ $# -eq 0 ]; then set -- build backend right smoke; fi
for name in "$@"; do
    start=$SECONDS
    echo "=== $name"
    part "$name" || { status=$?; echo "--- $name failed ($status) after $((SECONDS - start)) s"; exit "$status"; }
    echo "--- $name: $((SECONDS - start)) s"
done
