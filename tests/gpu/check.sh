#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check.sh BUILD [SECTION...] - every test that needs a GPU, under 8 minutes on one H200.
#
# Sections: facts kernels memcheck racecheck models integration chaos (default: all, in this order).
# Programs come from BUILD (make cuda all tests); nothing is compiled here. Logs: BUILD/check-gpu.
set -u
build=$(cd "${1:?folder of the build}" && pwd)
shift
cd "$(dirname "$0")/../.." || exit 1
logs=$build/check-gpu
mkdir -p "$logs"
. tests/steps.sh
start=$SECONDS
sections=${*:-facts kernels memcheck racecheck models integration chaos}
export EXL3_BACKEND_DIR=$build
sanitize="compute-sanitizer --error-exitcode 9 --print-limit 5"

facts() {
	step 100 "facts" sh tests/gpu/facts/run.sh "$build/tests/gpu/facts"
	grep -v 'holds$' "$logs/facts.log"
}

kernels() {
	step 60 "linear, every variant" "$build/tests/gpu/check_linear"
	step 60 "linear, many rows" "$build/tests/gpu/check_gemm" check
	step 60 "linear, candidates" "$build/tests/gpu/check_linear" --candidates --quick
	step 60 "linear, candidates for many rows" "$build/tests/gpu/check_gemm" check candidates
	step 60 "MLA" "$build/tests/gpu/check_mla" skip=wide
	step 40 "MLA, many heads" "$build/tests/gpu/check_mla" only=wide
	step 60 "routed experts" "$build/tests/gpu/check_moe"
	step 100 "tracks and plans" "$build/tests/gpu/check_plan"
	step 90 "backend against the reference" "$build/tests/checkkernel/checkkernel" --backend cuda --quick
}

# Every operand lies in an allocation of its own in these programs; ids and slots are random garbage.
memcheck() {
	step 60 "memcheck: linear" $sanitize --tool memcheck "$build/tests/gpu/check_linear" --quick
	step 60 "memcheck: MLA, garbage slots" $sanitize --tool memcheck "$build/tests/gpu/check_mla" quick
	step 90 "memcheck: experts, garbage ids" $sanitize --tool memcheck "$build/tests/gpu/check_moe" --tiny
}

racecheck() {
	step 90 "racecheck: experts" $sanitize --tool racecheck "$build/tests/gpu/check_moe" --tiny
}

models() {
	EXL3_DEMO_BACKEND=cuda step 60 "both models, perplexity through the GPU" tests/demo.sh "$build"
	tail -n 6 "$logs"/both_models*.log
}

integration() {
	step 150 "integration on the GPU" python3 tests/integration/run.py --build "$build" --backend cuda --short
	tail -n 1 "$logs/integration_on_the_GPU.log"
}

chaos() {
	step 120 "chaos, with GPU faults" python3 tests/integration/chaos.py --build "$build" --backend cuda --seconds 20
	cat "$logs/chaos,_with_GPU_faults.log"
}

for section in $sections; do
	$section
done
echo "$((SECONDS - start)) seconds"
report
[ "$failed" = 0 ]
