#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu.sh BUILD [FOLDER] - every benchmark that needs a GPU, into FOLDER (default bench/results).
#
# Small cells first, as clocks drift with heat. Each program measures its own ceilings in its run.
# EXL3_COMMIT names the commit where there is no git history.
set -u
build=${1:?folder of the build}
out=${2:-bench/results}
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
commit=${EXL3_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null)}
export EXL3_COMMIT=$commit
run 150 "$build/bench/kernel_cuda" --csv "$out/linear_$gpu.csv" --shapes 0,1,2,3,4
run 60 "$build/bench/mla_cuda" -o "$out/mla_$gpu.csv"
run 60 "$build/bench/moe_cuda" --csv "$out/moe_$gpu.csv"
run 60 "$build/bench/rpc" --daemon "$build/exl3-daemon" --model tests/models/layers -o "$out/rpc_host_$gpu.csv"
run 150 "$build/bench/rpc_stream" --daemon "$build/exl3-daemon" -o "$out/rpc_$gpu.csv"
run 120 "$build/bench/load" --mib 16384 --repeat 3 --backend cuda -o "$out/load_$gpu.csv"
run 60 "$build/bench/deterministic" --backend cuda -o "$out/deterministic_$gpu.csv"
# A model whose layers have the sizes of an 8-billion-parameter one; a few of them.
model=$(mktemp -d) || exit 1
trap 'rm -rf "$model"' EXIT
run 30 "$build/bench/load" --mib 120 --make "$model"
for what in "mlp --mlp" "self_attn.o_proj"; do
	# shellcheck disable=SC2086
	run 45 "$build/bench/fair" --daemon "$build/exl3-daemon" --backend cuda --arena device --model "$model" \
		--module model.layers.0.$what --seconds 2 -o "$out/fair_$gpu-$(echo "${what%% *}" | tr -d ._).csv"
done
run 60 python3 bench/recovery.py --build "$build" --backend cuda --mib 16384 --kills 4 --dir /dev/shm -o "$out/recovery_$gpu.csv"
run 30 "$build/bench/rowtable" --backend cuda -o "$out/rowtable_$gpu.csv"
# Clients with CUDA share one MPS server with the daemons.
CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
nvidia-cuda-mps-control -d && trap 'echo quit | timeout 5 nvidia-cuda-mps-control; rm -rf "$CUDA_MPS_PIPE_DIRECTORY" "$model"' EXIT
run 70 "$build/bench/serving" --daemon "$build/exl3-daemon" --backend cuda --memory device --rounds 2 --seconds 0.3 --private 8,16 \
	--pin -o "$out/serving_$gpu.csv"
