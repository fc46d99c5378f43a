#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh - runs all fact programs of a folder, each with a time limit, and counts what holds.
# usage: tests/gpu/facts/run.sh [FOLDER with the compiled programs]
# One line per fact: name | what docs/architecture.md says | what was seen | holds or DOES NOT HOLD.
dir=${1:-build/tests/gpu/facts}
failed=0 skipped=0 broken=0
for name in dlopen declarations vmm_survives vmm_readonly ipc imports portable blocking eager streams copies plan mps mps_control roundtrip direct; do
	timeout -k 2 40 "$dir/$name"
	rc=$?
	case $rc in
	0) ;;
	1) failed=$((failed + 1)) ;;
	77) skipped=$((skipped + 1)) ;;
	*)
		broken=$((broken + 1))
		echo "$name: ended with $rc"
		;;
	esac
done
echo "facts: $failed programs saw something else, $broken broke, $skipped skipped"
[ $broken = 0 ] && [ $failed = 0 ]
