# SPDX-License-Identifier: Apache-2.0
# steps.sh - sourced by the test scripts: one line per step, a log each, a time limit, counts.
# The caller sets $logs, a folder that exists.
: "${logs:?}"
passed=0 failed=0 skipped=0
failures=() # names of failed steps

step_log() { # NAME
	printf '%s/%s.log' "$logs" "$(printf %s "$1" | tr ' /' '__')"
}

# step SECONDS NAME COMMAND... - one test; a step's name is also its log's.
step() {
	local limit=$1 name=$2 log t=$SECONDS rc
	shift 2
	log=$(step_log "$name")
	timeout -k 10 "$limit" "$@" </dev/null >"$log" 2>&1
	rc=$?
	case $rc in
	0) passed=$((passed + 1)) what=ok ;;
	77) skipped=$((skipped + 1)) what="skipped: $(tail -n 1 "$log")" ;;
	124 | 137) failed=$((failed + 1)) what="FAILED: over its limit of $limit s" ;;
	*) failed=$((failed + 1)) what="FAILED (status $rc)" ;;
	esac
	printf '%-52s %s (%d s)\n' "$name" "$what" $((SECONDS - t))
	case $rc in
	0 | 77) ;;
	*)
		failures+=("$name")
		tail -n 60 "$log" | sed 's/^/    /'
		;;
	esac
	return $rc
}

# report - counts, then the failed steps again and which of their tests failed: the end of a log that was cut
# still tells.
report() {
	local name
	echo "$passed passed, $failed failed, $skipped skipped"
	for name in "${failures[@]}"; do
		echo "FAILED: $name"
		grep -aE '^(FAILED |\[  FAILED  \] .*[^0-9 ])|SUMMARY: [A-Za-z]+Sanitizer' "$(step_log "$name")" |
			awk '!seen[$0]++ && NR <= 40' | cut -c 1-600 | sed 's/^/    /'
	done
}

