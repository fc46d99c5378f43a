#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bundle.sh BUILD FILE - what a machine with a GPU and without the Debian packages needs for tests and benchmarks.
#
# FILE (a .tar.gz) holds the committed sources, the programs of BUILD (make all tests bench) stripped, and the shared
# libraries that they need beyond those of the C compiler. There, with nvcc, Python and the same processor family:
#
#   mkdir exl3 && tar -C exl3 -xzf FILE && cd exl3 && . ./bundle.env
#   make -k -j"$(nproc)" WERROR=0 cuda gpu-facts
#   tests/gpu/check.sh build && bench/gpu.sh build
set -eu
build=$(cd "${1:?folder of the build}" && pwd)
file=$(realpath "${2:?file to write}")
cd "$(dirname "$0")/../.."
[ -z "$(git status --porcelain -uno)" ] || echo "bundle: changes that are not committed stay here" >&2
[ -x "$build/exl3-daemon" ] || { echo "bundle: $build has no exl3-daemon: make all tests bench" >&2; exit 1; }
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
git archive HEAD | tar -C "$tree" -xf -
mkdir -p "$tree/build/bundled"
tar -C "$build" --exclude=obj --exclude=check --exclude=fuzz --exclude=fuzzobj --exclude=corpus --exclude=smoke \
	--exclude='*.d' --exclude='exl3-cuda.so' --exclude='*_cuda' --exclude='tests/gpu' --exclude='*_cpu' --exclude=root -cf - . |
	tar -C "$tree/build" -xf -
find "$tree/build" -type f -perm /111 -exec strip {} + 2>/dev/null || true
# What every machine with a C compiler has stays out: mixing C libraries does not work.
find "$tree/build" -type f -perm /111 -exec ldd {} + 2>/dev/null | awk '$3 ~ /^\// { print $3 }' | sort -u |
	grep -v -E "^$build|/(libc|libm|libdl|libpthread|librt|libresolv|ld-linux[^/]*|libstdc\+\+|libgcc_s|libgomp|libasan|libtsan|libubsan)\.so" |
	while read -r lib; do cp -L "$lib" "$tree/build/bundled/"; done
for lib in "$tree"/build/libexl3*.so; do # by their sonames; what the library opens by name lies beside it
	soname=$(objdump -p "$lib" | awk '$1 == "SONAME" { print $2 }')
	cp "$lib" "$tree/build/bundled/${soname:-${lib##*/}}"
done
cat >"$tree/bundle.env" <<END
# Sourced in this folder: where the programs find their libraries, and which commit this is.
export EXL3_COMMIT=$(git rev-parse --short=12 HEAD)
export EXL3_BACKEND_DIR=\$PWD/build LD_LIBRARY_PATH=\$PWD/build/bundled\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export PATH=\$PATH:/usr/local/cuda/bin
# Generated sources are newer than what they were made from: protoc is not needed.
find build/gen -type f -exec touch {} +
END
tar -C "$tree" -czf "$file" .
echo "$file: $(du -h "$file" | cut -f1)"
