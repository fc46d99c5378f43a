#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py - the real daemon with real client processes: every scenario of test_*.py, one line each.

Status 0: all passed. 1: some failed. 2: wrong arguments. 77: none could run.
"""
import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback

sys.dont_write_bytecode = True
import harness  # noqa: E402

SCENARIO_SECONDS = 300


def scenarios(pattern, backend):
    """Files with DEVICE = False test what is the same on every backend: they run on the cpu only."""
    for file in sorted(os.listdir(harness.HERE)):
        if not file.startswith("test_") or not file.endswith(".py"):
            continue
        module = importlib.import_module(file[:-3])
        if backend != "cpu" and not getattr(module, "DEVICE", True):
            continue
        for name, value in vars(module).items():  # in the order of the file
            label = f"{file[5:-3]}: {name[5:].replace('_', ' ')}"
            wanted = not pattern or any(p in label or p in name for p in pattern.split(","))
            if name.startswith("test_") and callable(value) and wanted:
                yield label, value


def run_one(env, function):
    """(word, text) of one scenario."""
    limit = SCENARIO_SECONDS + 5 * env.loops

    def too_long(_signum, _frame):
        raise harness.Failed(f"not done within {limit} s")
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(limit)
    try:
        function(env)
        return "ok", ""
    except harness.Skipped as e:
        return "skipped", str(e)
    except harness.Failed as e:
        return "FAILED", str(e)
    except Exception:  # a fault of the test itself is a failure too
        return "FAILED", traceback.format_exc(limit=-3)
    finally:
        signal.alarm(0)


def together(jobs):
    """Every jobs-th scenario in a process of its own, with daemons and folders of its own; most of them wait most of the
    time. What each printed, one after the other, then the sums and once more what failed."""
    procs, sums, failures, status = [], {"passed": 0, "failed": 0, "skipped": 0}, [], []
    argv = [a for i, a in enumerate(sys.argv) if a != "-j" and sys.argv[i - 1] != "-j"]
    for i in range(jobs):
        out = tempfile.TemporaryFile(mode="w+")
        procs.append((subprocess.Popen([sys.executable, *argv, "--part", f"{i}/{jobs}"], stdout=out, stderr=subprocess.STDOUT), out))
    for proc, out in procs:
        status.append(proc.wait())
        out.seek(0)
        # Without counts it has died: then all that it said is shown, and its status counts.
        body, counts, rest = re.fullmatch(r"(.*?)(?:^(\d+ passed, \d+ failed[^\n]*\n)(.*))?", out.read(), re.S | re.M).groups()
        print(body, end="")
        for number, word in re.findall(r"(\d+) (passed|failed|skipped)", counts or ""):
            sums[word] += int(number)
        failures.append(rest or "")
    print(", ".join(f"{n} {word}" for word, n in sums.items()))
    print("".join(failures), end="")
    bad = [s for s in status if s not in (0, 77)]
    return bad[0] if bad else min(status)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", default="build", help="build folder")
    parser.add_argument("--backend", default="cpu", help="backend of the daemon")
    parser.add_argument("-k", metavar="PATTERN", help="only scenarios with this in their name; several: A,B")
    parser.add_argument("--short", action="store_true", help="fewer repetitions, for builds with a sanitizer")
    parser.add_argument("--loops", type=int, help="how often a client dies at each step (default 3, with --short 1)")
    parser.add_argument("-j", metavar="N", type=int, default=1, help="N processes that share the scenarios")
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="only print the names")
    args = parser.parse_args()
    if args.j > 1 and not args.list:
        return together(args.j)

    harness.BACKEND = args.backend
    part, parts = (int(n) for n in args.part.split("/"))
    chosen = list(scenarios(args.k, args.backend))[part::parts]
    if args.list:
        print("\n".join(label for label, _ in chosen))
        return 0
    counts, failures = {"ok": 0, "FAILED": 0, "skipped": 0}, []
    env = harness.Env(args.build, args.backend, args.short, args.loops or (1 if args.short else 3))
    try:
        for label, function in chosen:
            start = time.monotonic()
            word, text = run_one(env, function)
            logs = env.logs() if word == "FAILED" else ""
            env.end_scenario()
            counts[word] += 1
            line = f"{word:8}{label} ({time.monotonic() - start:.1f} s){': ' if text else ''}{text}"
            print(line + logs, flush=True)
            if word == "FAILED":
                failures.append(line)
    finally:
        env.close()
    print(f"{counts['ok']} passed, {counts['FAILED']} failed" +
          (f", {counts['skipped']} skipped" if counts["skipped"] else ""))
    for line in failures:  # once more: the end of a log is what is read first, and what is left of a long one
        print(line)
    if counts["FAILED"]:
        return 1
    return 0 if counts["ok"] else 77


if __name__ == "__main__":
    sys.exit(main())
