#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# profile.sh [-o FOLDER] [-s SKIP] BUILD KERNEL [kernel_cuda's options] - why a kernel waits, by instruction and line.
#
# KERNEL is part of the function's name (unpack_dense, unpack_wgmma, gemm_sm90, gemv_kernel, lean_kernel, wide_kernel).
# One launch of it (after SKIP others, default 4) is measured by Nsight Compute, under a minute, with the clocks left as
# they are. FOLDER (default BUILD/profile) gets the report, its summary and the source page; stalls.py prints where
# samples fell. Example: bench/profile.sh build unpack_wgmma --kernels f16_library_wgmma --shapes 2 --m 2048
set -u
skip=4 out=
while getopts o:s: opt; do
	case $opt in
	o) out=$OPTARG ;;
	s) skip=$OPTARG ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))
build=${1:?folder of the build} kernel=${2:?part of a kernel name}
shift 2
out=${out:-$build/profile}
command -v ncu >/dev/null || { echo "ncu (Nsight Compute) not found" >&2; exit 77; }
mkdir -p "$out" || exit 1
name=$out/$kernel$(echo "$*" | tr -c 'a-zA-Z0-9\n' _)
sections=
for s in SpeedOfLight SchedulerStats WarpStateStats InstructionStats MemoryWorkloadAnalysis Occupancy LaunchStats SourceCounters; do
	sections="$sections --section $s"
done
# The smallest sampling interval: a launch of ten microseconds has few samples otherwise.
# shellcheck disable=SC2086
timeout -k 5 90 ncu --clock-control none $sections --sampling-interval 0 --import-source no --kernel-name "regex:$kernel" \
	--launch-skip "$skip" --launch-count 1 --force-overwrite -o "$name" \
	"$build/bench/kernel_cuda" --no-cublas --replays 20 "$@" >"$name.log" 2>&1 ||
	{ tail -n 20 "$name.log"; exit 1; }
ncu --import "$name.ncu-rep" --page details >"$name.txt" || exit 1
ncu --import "$name.ncu-rep" --page source --print-source sass --csv >"$name.csv" 2>>"$name.log" ||
	ncu --import "$name.ncu-rep" --page source --csv >"$name.csv" || exit 1
grep -E "Duration|SM Frequency|Executed Ipc|Issued Warp|Eligible|Registers Per|Achieved Occ|DRAM Throughput|L2 Cache Thr|Bank conf" "$name.txt"
python3 "$(dirname "$0")/stalls.py" "$name.csv"
