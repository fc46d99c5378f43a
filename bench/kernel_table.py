#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kernel_table.py - the built-in table of measured choices of one architecture, from results of bench/kernel_cuda.

    python3 bench/kernel_table.py sm90a bench/results/linear_h200.csv > kernels/cuda/tuned_builtin.h

A cell of the CSV becomes a line where the entry in its column `kernel` took less than MARGIN of `auto_us`, the time of what
the order of preference takes in the same run. A cell without `auto_us` shows no such thing and becomes none. A line holds
from the row count after the one measured before up to its own.
"""
import csv
import sys

MARGIN = 0.97  # what two runs of one entry differ by is no reason
AUTO = ("gemv", "gemm")  # they choose by shape themselves


def cells(path):
    """Rows of the CSV, and its first line."""
    with open(path) as f:
        lines = f.read().splitlines()
    head = [line for line in lines if line.startswith("#")]
    return list(csv.DictReader(line for line in lines if not line.startswith("#"))), head[0][2:] if head else ""


def shape(cell):
    n, shards = int(cell["n"]), int(cell["shards"])
    one = f"{n // shards}:{float(cell['bits']):g}:{cell['codebook']}"
    return f"{cell['k']} " + ",".join([one] * shards)


def lines(all_cells):
    """Lines of the table, and how many cells had nothing to compare with."""
    by_shape, blind = {}, 0
    for cell in all_cells:
        by_shape.setdefault(shape(cell), {}).setdefault(int(cell["m"]), []).append(cell)
    out = []
    for name, rows in by_shape.items():
        before = 0
        for m in sorted(rows):
            # Several data types of one cell: all must agree.
            winners = {c["kernel"] for c in rows[m]}
            auto = [c.get("auto_us") or "" for c in rows[m]]
            if not all(auto):
                blind += len(rows[m])
            elif len(winners) == 1 and not winners & set(AUTO) and all(
                    float(c["us"]) < MARGIN * float(c["auto_us"]) for c in rows[m]):
                out.append(f"linear {name} {before + 1} {m} {winners.pop()}")
            before = m
    return out, blind


def main():
    arch, paths = sys.argv[1], sys.argv[2:]
    found, sources, blind = [], [], 0
    for path in paths:
        read, head = cells(path)
        more, without = lines(read)
        found += more
        blind += without
        sources.append(f" * {path}: {head}\n" if head else f" * {path}\n")
    if not paths or arch.strip("abcdefghijklmnopqrstuvwxyz0123456789_"):
        sys.exit(__doc__)
    print("/* SPDX-License-Identifier: Apache-2.0 */")
    print("/*\n * tuned_builtin.h - made by bench/kernel_table.py; do not edit. Lines as in kernels/tuned.h, from:\n *")
    print("".join(sources), end="")
    if blind:
        print(f" *\n * {blind} cells name the fastest entry only, not the time of the one that is taken without a table: they\n"
              " * cannot show that another one is faster, and make no line.")
    print(" */")
    print("#ifndef EXL3_CUDA_TUNED_BUILTIN_H\n#define EXL3_CUDA_TUNED_BUILTIN_H\n")
    print(f"static const char exl3_tuned_builtin_{arch}[] =")
    print("\n".join(f'\t"{line}\\n"' for line in found) + ";" if found else '\t"";')
    print("\n#endif")


main()
