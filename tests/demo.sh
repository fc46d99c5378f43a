#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# demo.sh BUILD - two language models in one daemon, several client processes writing at the same time.
#
# Ends with a table: weights held once against private copies, speed of each client, and the perplexity of
# held-out text through the daemon beside the reference's. Status 1 if that differs by more than 0.01, or
# if anything else goes wrong. Every wait has a time limit; nothing is left behind.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${1:-build}
models=tests/models
tokens=160 limit_s=200 tolerance=0.01
dir=$(mktemp -d /tmp/exl3-demo.XXXXXX)
export EXL3_SOCKET=$dir/0.sock
daemon=
pids=()

clean_up() {
	trap - EXIT INT TERM
	for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null; done
	if [ -n "$daemon" ] && kill -0 "$daemon" 2>/dev/null; then
		kill "$daemon"
		for _ in $(seq 100); do
			kill -0 "$daemon" 2>/dev/null || break
			sleep 0.1
		done
		kill -9 "$daemon" 2>/dev/null
	fi
	wait 2>/dev/null
	rm -rf "$dir"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

die() {
	echo "demo: $*" >&2
	[ -s "$dir/daemon.log" ] && tail -n 20 "$dir/daemon.log" >&2
	exit 1
}

# model_number KEY MODEL - value of KEY of one model, from `exl3ctl models --json` on stdin.
model_number() {
	tr ',{}[]' '\n\n\n\n\n' | awk -v key="$1" -v model="$2" '
		{ gsub(/[[:space:]]/, "") }
		/^"name":/ { name = $0; sub(/^"name":"/, "", name); sub(/"$/, "", name) }
		index($0, "\"" key "\":") == 1 && name == model { sub(/^[^:]*:/, ""); print; exit }'
}

value() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" "$2" | tail -n 1; }

# ---- the daemon ----

"$build/exl3-daemon" --socket "$EXL3_SOCKET" --backend "${EXL3_DEMO_BACKEND:-cpu}" --model "tiny-llama=$models/tiny-llama" \
	--model "tiny-deepseek=$models/tiny-deepseek" >"$dir/daemon.log" 2>&1 &
daemon=$!
ready=
for _ in $(seq $((limit_s * 10))); do
	kill -0 "$daemon" 2>/dev/null || die "the daemon ended"
	"$build/exl3ctl" models --json >"$dir/models.json" 2>/dev/null &&
		[ "$(grep -o '"ready"' "$dir/models.json" | wc -l)" = 2 ] && ready=1 && break
	sleep 0.1
done
[ -n "$ready" ] || die "the models were not loaded within $limit_s s"
echo "One daemon (pid $daemon) holds both models. Four processes write at the same time, each with its own"
echo "attention, cache and sampling; every quantized matrix is multiplied in the daemon."
echo

# ---- several clients at once ----

clients=(
	"llama-1|tiny_llama|tiny-llama|1|The history of the town began when "
	"llama-2|tiny_llama|tiny-llama|2|Once upon a time there was a small "
	"deepseek-1|tiny_deepseek|tiny-deepseek|3|The history of the town began when "
	"deepseek-2|tiny_deepseek|tiny-deepseek|4|In the morning the children went to "
)
for c in "${clients[@]}"; do
	IFS='|' read -r label program _ seed prompt <<<"$c"
	timeout $limit_s "$build/examples/$program" generate --prompt "$prompt" --tokens $tokens --temperature 0.7 \
		--seed "$seed" --label "$label" 2>"$dir/$label.err" &
	pids+=($!)
done
for i in "${!pids[@]}"; do
	wait "${pids[$i]}" || die "client ${clients[$i]%%|*} failed: $(cat "$dir/${clients[$i]%%|*}.err")"
done
pids=()

# ---- perplexity of the held-out text ----

echo
echo "Perplexity of held-out text through the daemon, both models at once..."
for m in llama deepseek; do
	timeout $limit_s "$build/examples/tiny_$m" perplexity --text "$models/tiny-$m/heldout.txt" \
		>"$dir/ppl-$m" 2>"$dir/ppl-$m.err" &
	pids+=($!)
done
for pid in "${pids[@]}"; do
	wait "$pid" || die "perplexity: $(cat "$dir"/ppl-*.err)"
done
pids=()
"$build/exl3ctl" status --json >"$dir/status.json" || die "no status"

# ---- the table ----

echo
printf '%-12s %-14s %8s %10s %10s\n' client model tokens tokens/s requests
for c in "${clients[@]}"; do
	IFS='|' read -r label _ model _ _ <<<"$c"
	printf '%-12s %-14s %8s %10s %10s\n' "$label" "$model" "$(value tokens "$dir/$label.err")" \
		"$(value tokens_per_s "$dir/$label.err")" "$(value requests "$dir/$label.err")"
done
echo
once=0 private=0
printf '%-14s %22s %30s\n' model "weight bytes, held once" "as private copies"
for m in tiny-llama tiny-deepseek; do
	bytes=$(model_number weight_bytes $m <"$dir/models.json")
	[ -n "$bytes" ] && [ "$bytes" -gt 0 ] || die "no weight bytes of $m in $(cat "$dir/models.json")"
	n=$(printf '%s\n' "${clients[@]}" | grep -c "|$m|")
	once=$((once + bytes)) private=$((private + n * bytes))
	printf '%-14s %22d %20d (%d x)\n' $m "$bytes" $((n * bytes)) "$n"
done
printf '%-14s %22d %20d\n' together $once $private
echo
printf '%-14s %14s %14s %12s\n' model perplexity reference difference
failed=0
for m in llama deepseek; do
	got=$(value perplexity "$dir/ppl-$m")
	want=$(sed -n '/"byte_perplexity"/,/}/s/.*"quantized": *\([0-9.]*\).*/\1/p' "$models/tiny-$m/reference.json")
	awk -v m="tiny-$m" -v got="$got" -v want="$want" -v tol=$tolerance 'BEGIN {
		d = got - want
		printf "%-14s %14.4f %14.4f %+12.4f\n", m, got, want, d
		exit !(got != "" && want > 1 && d <= tol && -d <= tol)
	}' || failed=1
done
# status_number KEY - of the daemon as a whole: its first one in the reply.
status_number() {
	tr ',{}' '\n\n\n' <"$dir/status.json" | sed -n "s/^[[:space:]]*\"$1\":[[:space:]]*\([0-9]*\).*/\1/p" | head -n 1
}
requests=$(status_number requests)
errors=$(status_number errors)
echo
echo "The daemon has completed $requests requests, $errors of them with an error."
[ "${requests:-0}" -gt 0 ] && [ "$errors" = 0 ] || failed=1
[ $failed = 0 ] || die "perplexity differs by more than $tolerance, or requests failed"
kill "$daemon"
wait "$daemon" || die "the daemon ended with status $?"
daemon=
