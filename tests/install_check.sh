#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install_check.sh ROOT - a program that sees only what `make install` put under ROOT compiles, links and starts.
set -eu
root=$(cd "$1" && pwd)/usr/local
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cat >"$dir/a.c" <<'C'
#include <exl3.h>
#include <stdio.h>
int main(void)
{
	struct exl3_client *c = NULL;
	int ret = exl3_connect("/nonexistent/socket", NULL, &c);

	printf("%d %s\n", ret, exl3_last_error());
	return ret < 0 && c == NULL ? 0 : 1;
}
C
# As pkg-config says, with ROOT before the folders of the machine.
flags() {
	PKG_CONFIG_SYSROOT_DIR="${root%/usr/local}" PKG_CONFIG_PATH="$root/lib/pkgconfig" pkg-config "$@" exl3
}
# shellcheck disable=SC2046
gcc -std=c11 -Wall -Wextra -Werror $(flags --cflags) -o "$dir/shared" "$dir/a.c" $(flags --libs)
gcc -std=c11 -I"$root/include" -o "$dir/static" "$dir/a.c" "$root/lib/libexl3.a" -lprotobuf-c -lpthread
# The header is one for C99 and for C++ too.
gcc -std=c99 -pedantic -Wall -Wextra -Werror -I"$root/include" -fsyntax-only "$dir/a.c"
g++ -x c++ -std=c++17 -pedantic -Wall -Wextra -Werror -I"$root/include" -fsyntax-only "$dir/a.c"
LD_LIBRARY_PATH="$root/lib" "$dir/shared"
"$dir/static"
"$root/bin/exl3ctl" version --client 2>/dev/null || "$root/bin/exl3ctl" version || [ $? = 4 ]
# Only the public API is exported.
if nm -D --defined-only "$root/lib/libexl3.so" | awk '$2 ~ /[TDBR]/ { sub(/@.*/, "", $3); print $3 }' | grep -v '^exl3_' | grep -v '^EXL3_'; then
	echo "libexl3.so exports names that are not exl3_*" >&2
	exit 1
fi
# Nothing of the folder that it was built in.
tree=$(cd "$(dirname "$0")/.." && pwd)
if grep -lF "$tree/" "$root/bin/exl3ctl" "$root/sbin/exl3-daemon" "$root/lib/libexl3.so.0" \
	"$root/lib/libexl3-mapped.so" "$root/lib/libexl3.a"; then
	echo "names the folder of its build" >&2
	exit 1
fi
for f in bin/exl3ctl sbin/exl3-daemon lib/libexl3.so.0 lib/pkgconfig/exl3.pc lib/systemd/system/exl3-daemon@.service \
	lib/systemd/system/exl3-daemon@.socket share/man/man8/exl3-daemon.8 share/man/man1/exl3ctl.1 \
	share/bash-completion/completions/exl3ctl share/exl3/exl3.py share/exl3/exl3_torch.py; do
	[ -e "$root/$f" ] || { echo "not installed: $f" >&2; exit 1; }
done
# What goes again leaves the configuration, and nothing else.
cp -a "${root%/usr/local}" "$dir/root"
"${MAKE:-make}" --no-print-directory -C "$tree" uninstall DESTDIR="$dir/root" >/dev/null
left=$(cd "$dir/root" && find . ! -type d)
[ "$left" = ./etc/exl3-daemon/exl3-daemon.conf.example ] || { echo "left by uninstall: $left" >&2; exit 1; }
