#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""stalls.py FILE.csv [COUNT] - where a kernel's warps wait: samples by reason, and the instructions with most of them.

FILE is Nsight Compute's source page as CSV (profile.sh writes it): one row per machine instruction. Columns are found by their
names, since releases differ: the instruction ("Source"), executions ("Instructions Executed"), stall reasons ("stall_*").
"""
import csv
import sys


def number(text):
    try:
        return float(text.replace(",", "")) if text else 0.0
    except ValueError:
        return 0.0


def read(path):
    """The header and rows of the table: what comes before the line that has a column for the instruction is left out."""
    with open(path, newline="", encoding="utf-8", errors="replace") as f:
        lines = list(csv.reader(f))
    for i, line in enumerate(lines):
        if any(c.strip().lower() in ("source", "sass") for c in line) and len(line) > 4:
            return line, [row for row in lines[i + 1:] if len(row) == len(line)]
    sys.exit(f"{path}: no line with a column Source")


def main(path, count):
    header, rows = read(path)
    name = [c.strip().lower() for c in header]
    source = next(i for i, c in enumerate(name) if c in ("source", "sass"))
    executed = next((i for i, c in enumerate(name) if c.startswith("instructions executed")), None)
    # Each reason twice: all samples, and those in which the scheduler issued nothing. The former are enough.
    reasons = [i for i, c in enumerate(name) if c.startswith("stall_") and "not_issued" not in c and "not-issued" not in c]
    if not reasons:
        sys.exit(f"{path}: no columns stall_*; the report has no section SourceCounters")
    totals = {i: sum(number(r[i]) for r in rows) for i in reasons}
    whole = sum(totals.values())
    if not whole:
        sys.exit(f"{path}: no samples")
    print(f"{whole:.0f} samples; by reason:")
    for i in sorted(reasons, key=lambda i: -totals[i]):
        if totals[i] >= 0.005 * whole:
            print(f"  {100 * totals[i] / whole:5.1f} %  {name[i][6:]}")
    if executed is not None:
        per_warp = sorted(number(r[executed]) for r in rows)
        print(f"{sum(per_warp):.0f} warp instructions in {len(rows)} places")
    print("instructions with most samples (place, share, reasons):")
    weight = [sum(number(r[i]) for i in reasons) for r in rows]
    for at in sorted(sorted(range(len(rows)), key=lambda r: -weight[r])[:count]):
        row = rows[at]
        top = sorted(reasons, key=lambda i: -number(row[i]))[:3]
        why = ", ".join(f"{name[i][6:]} {100 * number(row[i]) / whole:.1f}" for i in top if number(row[i]))
        print(f"  {at:5d}  {100 * weight[at] / whole:5.1f} %  {row[source].strip():<64.64}  {why}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 40)
