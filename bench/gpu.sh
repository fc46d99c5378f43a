#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu.sh BUILD [FOLDER [SECTION...]] - every benchmark that needs a GPU, into FOLDER (default bench/results).
#
# Sections: kernels rpc daemon serving (default: all, in this order; together more than ten minutes); and, only where it is
# named, candidates: kernels that are to be compared against those in use (docs/performance.md, "Not yet measured"); six minutes;
# routed_and_mla is its second half.
# Small cells first, as clocks drift with heat. Each program measures its own ceilings in its run.
# EXL3_COMMIT names the commit where there is no git history.
set -u
build=${1:?folder of the build}
out=${2:-bench/results}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "$0")/.." || exit 1
export EXL3_BACKEND_DIR=$build
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | sed 's/^NVIDIA //' | tr 'A-Z ' 'a-z-')
[ -n "$gpu" ] || { echo "no GPU here" >&2; exit 77; }
run() { # SECONDS COMMAND...
	local limit=$1 rc
	shift
	echo "== $*"
	timeout -k 5 "$limit" "$@"
	rc=$?
	[ $rc = 0 ] || echo "ended with $rc"
}
EXL3_COMMIT=${EXL3_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null)}
export EXL3_COMMIT
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT

kernels() {
	run 150 "$build/bench/kernel_cuda" --csv "$out/linear_$gpu.csv" --shapes 0,1,2,3,4
	# Against a library that multiplies bf16, which is what the rows of a prefill are compared with.
	run 60 "$build/bench/kernel_cuda" --csv "$out/linear_bf16_$gpu.csv" --shapes 0,1,2,3,4 --m 512,1024,2048,8192 --dtype bf16
	run 60 "$build/bench/kernel_cuda" --no-cublas --csv "$out/linear_bits_$gpu.csv" --shapes 2 --m 1,4,8,16 --bits 1,2,3,4,5,6,8 \
		--codebooks mcg,mul1,3inst
	run 60 "$build/bench/mla_cuda" -o "$out/mla_$gpu.csv"
	run 60 "$build/bench/moe_cuda" --csv "$out/moe_$gpu.csv"
}

rpc() {
	run 60 "$build/bench/rpc" --daemon "$build/exl3-daemon" --model tests/models/layers -o "$out/rpc_host_$gpu.csv"
	run 150 "$build/bench/rpc_stream" --daemon "$build/exl3-daemon" -o "$out/rpc_$gpu.csv"
	run 100 "$build/bench/plan_cuda" --csv "$out/plan_$gpu.csv"
}

daemon() {
	# A model whose layers have the sizes of an 8-billion-parameter one; a few of them.
	local model=$scratch/model what
	run 120 "$build/bench/load" --mib 16384 --repeat 3 --backend cuda -o "$out/load_$gpu.csv"
	run 60 "$build/bench/deterministic" --backend cuda -o "$out/deterministic_$gpu.csv"
	mkdir "$model"
	run 30 "$build/bench/load" --mib 120 --make "$model"
	for what in "mlp --mlp" "self_attn.o_proj"; do
		# shellcheck disable=SC2086
		run 45 "$build/bench/fair" --daemon "$build/exl3-daemon" --backend cuda --arena device --model "$model" \
			--module model.layers.0.$what --seconds 2 -o "$out/fair_$gpu-$(echo "${what%% *}" | tr -d ._).csv"
	done
	run 60 python3 bench/recovery.py --build "$build" --backend cuda --mib 16384 --kills 4 --dir /dev/shm \
		-o "$out/recovery_$gpu.csv"
	run 30 "$build/bench/rowtable" --backend cuda -o "$out/rowtable_$gpu.csv"
}

# Clients with CUDA share one MPS server with the daemons.
serving() {
	export CUDA_MPS_PIPE_DIRECTORY=$scratch/mps CUDA_MPS_LOG_DIRECTORY=$scratch/mps
	mkdir "$CUDA_MPS_PIPE_DIRECTORY"
	nvidia-cuda-mps-control -d || { echo "no MPS control daemon" >&2; return; }
	run 70 "$build/bench/serving" --daemon "$build/exl3-daemon" --backend cuda --memory device --rounds 2 --seconds 0.3 \
		--private 8,16 --pin -o "$out/serving_$gpu.csv"
	echo quit | timeout 5 nvidia-cuda-mps-control
	unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# Kernels of a line take turns in one run. Ends with what the daemon would choose, so that a drift shows.
candidates() {
	local dense=("$build/bench/kernel_cuda" --all) m
	run 20 "${dense[@]}" --no-cublas --shapes 0,1,2 --m 1 --kernels gemv_w12_fused,gemv_pairs_fused,gemv_lean_fused
	run 20 "${dense[@]}" --no-cublas --shapes 0,1,2 --m 8 --kernels gemv_w16_shared,gemv_pairs_shared,gemv_lean_shared,gemv_lean_beside
	run 20 "${dense[@]}" --no-cublas --shapes 0,2 --m 1,4 --codebooks mul1 --kernels gemv_w12_fused,gemv_pairs_fused,gemv_lean_fused
	run 20 "${dense[@]}" --no-cublas --shapes 0,1,2 --m 16,32 --kernels gemv_wide,gemv_wide_beside,gemv_wide_bulk,gemv_wide_fused
	for m in 64 128 256; do
		run 15 "${dense[@]}" --no-cublas --shapes 0,2,3 --m "$m" --kernels "wgmma_n$m,wgmma_packed_n$m,wgmma_turns_n$m"
	done
	run 60 "${dense[@]}" --shapes 0,2,3 --m 512,1024,2048 --dtype bf16 --kernels gemm,f16_library,f16_library_mma,f16_library_wgmma \
		--csv "$scratch/many.csv"
	cut -d , -f 1,2,7,8,10,11 "$scratch/many.csv"
	run 20 "${dense[@]}" --no-cublas --trace --shapes 0,2 --m 1 --kernels gemv_w12_fused,gemv_lean_fused
	run 20 "${dense[@]}" --no-cublas --shapes 0,2 --m 1,8,64
	routed_and_mla
}

# Each by itself and after its check, so that one which hangs costs its own limit only.
routed_and_mla() {
	local moe=("$build/bench/moe_cuda" --steps --variant) v
	for v in moe_early moe_early_one moe_pass moe_team moe_tall moe_tall_turns; do
		run 25 "$build/tests/gpu/check_moe" --quick --variant "$v"
	done
	run 20 "${moe[@]}" moe_early --tokens 1,2,4,8,16,32,64,128
	run 20 "${moe[@]}" moe_early_one --tokens 1,2,4,8
	run 25 "${moe[@]}" moe_team --tokens 128,512,2048
	for v in moe_pass moe_tall moe_tall_turns; do
		run 25 "${moe[@]}" "$v" --tokens 512,2048,8192
	done
	run 30 "$build/tests/gpu/check_mla" only=apart
	run 60 "$build/bench/mla_cuda"
}

[ $# -gt 0 ] || set -- kernels rpc daemon serving
for section in "$@"; do
	$section
done
