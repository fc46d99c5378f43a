#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check.sh - builds and runs every test that needs no GPU; one line per step, counts last.
#
# Each step has a time limit and a log under build/check/; the log of a failed step is shown.
# Exit status 77 of a test means skipped, and its last line says what was missing.
set -u
cd "$(dirname "$0")/.." || exit 1
make=${MAKE:-make}
logs=build/check
jobs=$(nproc)
start=$SECONDS
mkdir -p $logs
. tests/steps.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$jobs}
export ASAN_OPTIONS=protect_shadow_gap=0:detect_leaks=1:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/tests/tsan.supp

# run_dir LABEL BUILD DIR LIMIT - every program of a test folder.
run_dir() {
	local src name
	for src in tests/"$3"/*.c; do
		name=$(basename "$src" .c)
		[ -x "$2/tests/$3/$name" ] || continue
		step "$4" "$1 $3/$name" "$2/tests/$3/$name"
	done
}

build() { # LABEL ARGS...
	local label=$1
	shift
	step 900 "build $label" $make --no-print-directory -j"$jobs" "$@" all tests || {
		report
		exit 1
	}
}

build plain
run_dir plain build unit 120
run_dir plain build stress 120
for host in build/tests/gpu/host_*; do
	[ ! -x "$host" ] || step 120 "device code on the host: ${host##*/}" "$host"
done
step 300 "kernels against the reference" build/tests/checkkernel/checkkernel --quick
step 500 "integration" "${PYTHON:-python3}" tests/integration/run.py -j 2 --build build
step 240 "demo" tests/demo.sh build
step 60 "install" $make --no-print-directory install DESTDIR="$PWD/$logs/root"
step 60 "installed header and library" tests/install_check.sh "$logs/root"

build "address,undefined" SAN=address,undefined
run_dir asan build-address unit 240
step 300 "asan kernels" build-address/tests/checkkernel/checkkernel --quick --tiny
step 600 "asan integration" "${PYTHON:-python3}" tests/integration/run.py -j 2 --build build-address --short

build thread SAN=thread
run_dir tsan build-thread stress 240
# Where threads of the daemon or of libexl3 meet; the rest is the same code under other names.
step 600 "tsan integration" "${PYTHON:-python3}" tests/integration/run.py -j 2 --build build-thread --short \
	-k "async:,chaos:,chunks:,devices:,hostile:,lifecycle:,mapped: counted,mapped: unload,mapped: worker,mapped: policy w,mapped: other,merging:,metrics:,outlive:,plans:,reconnect:,reload:,stream:,tenants:"

if command -v clang >/dev/null 2>&1; then
	if step 900 "build fuzz targets" $make --no-print-directory -j"$jobs" fuzz; then
		for f in build/fuzz/fuzz_*; do
			case $f in *.d | *obj*) continue ;; esac
			name=$(basename "$f")
			mkdir -p build/corpus/"$name"
			kept=(tests/fuzz/corpus/"${name#fuzz_}")
			[ -d "${kept[0]}" ] || kept=()
			step 60 "fuzz $name" "$f" -max_total_time=5 -rss_limit_mb=2048 -timeout=10 -close_fd_mask=1 \
				build/corpus/"$name" "${kept[@]}"
		done
	fi
else
	skipped=$((skipped + 1))
	echo "fuzz targets: skipped, clang is not installed"
fi

if [ -n "${NVCC:-}" ]; then
	step 600 "CUDA smoke list compiles" $make --no-print-directory -j"$jobs" BUILD=build/smoke cuda-smoke
else
	skipped=$((skipped + 1))
	echo "CUDA code: skipped, nvcc is not installed"
fi

echo "$((SECONDS - start)) seconds"
report
[ "$failed" = 0 ]
