#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# deps.sh - installs the Debian packages that the build and the tests need, or says which are missing.
set -u
packages="gcc g++ make pkg-config protobuf-c-compiler libprotobuf-c-dev liburing-dev libnuma-dev libinih-dev
libcjson-dev libsystemd-dev libxxhash-dev libcmocka-dev libgomp1 libopenblas-dev python3 clang libclang-rt-dev"
missing=
for p in $packages; do
	case $(dpkg-query -W -f='${Status}' "$p" 2>/dev/null) in
	"install ok installed") ;;
	*) missing="$missing $p" ;;
	esac
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null 2>&1; then
	echo "missing packages (Debian names):$missing" >&2
	exit 1
fi
sudo=
if [ "$(id -u)" != 0 ]; then
	if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
		sudo=sudo
	else
		echo "missing packages; install them with: apt-get install$missing" >&2
		exit 1
	fi
fi
echo "installing:$missing"
# shellcheck disable=SC2086
if ! { $sudo env DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
	$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >/dev/null; then
	echo "apt-get could not install:$missing" >&2
	exit 1
fi
