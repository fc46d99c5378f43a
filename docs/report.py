#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""report.py - tables of docs/performance.md and README.md from bench/results/*.csv.

Without arguments it rewrites what stands between <!-- tables --> and <!-- end of tables --> in both files;
with --check it only says whether they are what the CSV files say (status 1 if not). No figure is typed by hand.
"""
import csv
import glob
import os
import subprocess
import sys

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"

# CSV prefix: title, columns that name a row, column that runs across, values (a table each; README.md has the
# first), and which rows README.md shows.
KINDS = {
    "linear": ("Linear layers, microseconds, by rows", ("k", "n", "shards", "bits", "codebook", "dtype"), "m",
               {"us": "", "bound_us": "the bound", "cublas_us": "bf16 cuBLAS in the same run", "chain_us": "in a chain"},
               lambda r: r["bits"] == "4" and r["codebook"] == "mcg"),
    "moe": ("Routed experts, microseconds, by tokens", ("experts", "topk", "hidden", "inter", "bits", "codebook"), "tokens",
            {"us": "", "bound_us": "the bound"}, lambda r: r["bits"] == "4"),
    "mla": ("MLA decode, microseconds, by queries", ("heads", "dim", "value_dim", "cache", "layout", "topk"), "batch",
            {"us": "", "bound_us": "the bound"}, lambda r: r["topk"] == "2048"),
    "cpu": ("Linear layers on the CPU, microseconds, by rows", ("k", "n", "bits", "codebook", "threads"), "m",
            {"us": "", "ratio_to_openblas": "OpenBLAS sgemm on decoded weights takes so many times as long",
             "ratio_to_plain_c": "plain C takes so many times as long"},
            lambda r: r["k"] == r["n"] and r["bits"] == "4" and r["codebook"] == "mul1"),
    "serving": ("Decoders at once, tokens per second, by client processes", ("model", "mode"), "clients",
                {"tokens_per_s": "", "rows_per_launch": "rows per launch", "launch_us": "time on the device per call, microseconds",
                 "p99_us": "p99 of a call, microseconds"}, lambda r: r["mode"] != "merged"),
    "rowtable": ("Merged rows against rows of one request, by rows", ("module", "k", "n", "memory"), "rows",
                 {"ratio": "", "plain_us": "one request, microseconds", "table_us": "merged requests, microseconds"},
                 lambda r: False),
    "rpc": ("One request and its answer, microseconds, by client processes", ("mode", "mps"), "clients",
            {"us_per_call": "", "syscalls_per_call": "system calls for each, both sides"},
            lambda r: True),
}


def read(path):
    """(comment lines, rows as dicts)."""
    with open(path) as f:
        lines = f.read().splitlines()
    notes = [line[1:].strip() for line in lines if line.startswith("#")]
    return notes, list(csv.DictReader(line for line in lines if line and not line.startswith("#")))


def figure(text):
    """At most four digits: no measurement here is better than that."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return text or ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def pivot(rows, names, across, value):
    names = [n for n in names if any(r.get(n) for r in rows)]
    columns = sorted({r[across] for r in rows if r.get(across)}, key=float)
    table = {}
    for r in rows:
        # A shape that was measured twice shows its first figure: the second one is there to show the drift.
        table.setdefault(tuple(r[n] for n in names), {}).setdefault(r[across], figure(r[value]))
    return markdown(names + [f"{across} {c}" for c in columns],
                    [list(key) + [cells.get(c, "") for c in columns] for key, cells in table.items()])


def plain(rows):
    names = [n for n in rows[0] if any(r[n] for r in rows)]
    return markdown(names, [[figure(r[n]) for n in names] for r in rows])


def results():
    """CSV files; in a checkout only those that belong to it."""
    paths = sorted(glob.glob(os.path.join(TOP, "bench", "results", "*.csv")))
    try:
        known = subprocess.run(["git", "-C", TOP, "ls-files", "bench/results"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return paths
    return [p for p in paths if os.path.relpath(p, TOP) in known.stdout.split()]


def report(short):
    out = []
    for path in results():
        name = os.path.basename(path)
        kind = name.split("_")[0]
        notes, rows = read(path)
        notes = notes or ["not recorded"]
        if kind in KINDS:
            title, names, across, values, shown = KINDS[kind]
            rows = [r for r in rows if shown(r)] if short else rows
            body = []
            for value, what in list(values.items())[:1 if short else None]:
                measured = [r for r in rows if r.get(value)]
                if measured:
                    body += [f"{what[0].upper()}{what[1:]}:", ""] if what else []
                    body += pivot(measured, names, across, value) + [""]
        else:
            title, body = kind.capitalize(), plain(rows) if rows and not short else []
        if not body:
            continue
        out += [f"### {title} (`{name}`)", ""] + [f"{note}  " for note in notes[1:]] + ["", f"Command: `{notes[0]}`", ""]
        out += body + [""]
    return "\n".join(out) if out else "Nothing has been measured yet.\n"


def main():
    stale = []
    for path, short in (("docs/performance.md", False), ("README.md", True)):
        full = os.path.join(TOP, path)
        with open(full) as f:
            text = f.read()
        head, rest = text.split(BEGIN)
        tail = rest.split(END)[1]
        fresh = f"{head}{BEGIN}\n{report(short)}\n{END}{tail}"
        if fresh != text:
            stale.append(path)
            if "--check" not in sys.argv:
                with open(full, "w") as f:
                    f.write(fresh)
    if "--check" in sys.argv and stale:
        print(f"run docs/report.py: {', '.join(stale)} differ from bench/results")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
