#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# fake_mps.sh - behaves like nvidia-cuda-mps-control: -f serves in the foreground, "quit" on standard input ends it
# when the last client has left. Clients are files "client*" in the pipe folder. What it does wrong is in the file
# $FAKE_MPS, one word: crash, hang, slow, deaf (never ends by quit), die (some time after its start).
dir=$CUDA_MPS_PIPE_DIRECTORY
mode=$(cat "$FAKE_MPS" 2>/dev/null)
[ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 9
if [ "$1" = -f ]; then
	echo "$$ $*" >>"$FAKE_MPS.started"
	case $mode in
	crash) exit 3 ;;
	hang) exec sleep 1000 ;;
	slow) sleep 1 ;;
	esac
	: >"$dir/control"
	[ "$mode" = die ] && { sleep 0.5; exit 4; }
	while [ ! -e "$dir/quit" ] || [ "$mode" = deaf ]; do
		sleep 0.02
	done
	while ls "$dir"/client* >/dev/null 2>&1; do
		sleep 0.02
	done
	rm -f "$dir/control"
	exit 0
fi
read -r command
[ "$command" = quit ] || exit 8
: >"$dir/quit"
while [ -e "$dir/control" ]; do
	sleep 0.02
done
