# SPDX-License-Identifier: Apache-2.0
# exl3ctl.bash - completion for bash: verbs and options come from `exl3ctl help`, models from the daemon.

# _exl3ctl_offer BEGINNING - those lines of standard input that begin so. Not compgen -W: it would expand them.
_exl3ctl_offer() {
	local line
	while IFS= read -r line; do
		if [[ $line == "$1"* ]]; then COMPREPLY+=("$line"); fi
	done
}

_exl3ctl() {
	local program=${COMP_WORDS[0]} current=${COMP_WORDS[COMP_CWORD]} verb=help after=0 i
	local -a where=()
	COMPREPLY=()

	# The verb, how many words ago it was, and which daemon is meant.
	for ((i = 1; i < COMP_CWORD; i++)); do
		case ${COMP_WORDS[i]} in
		--socket | --node | --domain)
			((i + 1 < COMP_CWORD)) || return # a value: files, by complete's default
			where+=("${COMP_WORDS[i]}" "${COMP_WORDS[++i]}")
			;;
		-*) ;;
		*)
			verb=${COMP_WORDS[i]} after=$((COMP_CWORD - i))
			break
			;;
		esac
	done
	case $verb$after:$current in
	*:-*)
		_exl3ctl_offer "$current" < <("$program" help "$verb" 2>/dev/null |
			sed -n 's/^  \(--[a-z0-9-]*\).*/\1/p'; echo --help)
		;;
	help[01]:*) _exl3ctl_offer "$current" < <("$program" help | sed -n 's/^  \([a-z][a-z]*\) .*/\1/p') ;;
	run1:*) _exl3ctl_offer "$current" < <(printf '%s\n' linear mlp moe mla) ;;
	fds1:*) _exl3ctl_offer "$current" < <(echo drop) ;;
	modules1:* | tensors1:* | resolve1:* | unload1:* | run2:* | fds2:*)
		_exl3ctl_offer "$current" < <(timeout 2 "$program" "${where[@]}" models 2>/dev/null |
			sed -n 's/^  \([^ ][^ ]*\) .*/\1/p')
		;;
	esac
}
complete -o default -F _exl3ctl exl3ctl
