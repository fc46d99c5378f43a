# SPDX-License-Identifier: Apache-2.0
"""Documents against the programs: a page that has gone stale fails here."""
import glob
import os
import re
import sys

from harness import HERE, check, equal

DEVICE = False

TOP = os.path.dirname(os.path.dirname(HERE))


def read(path):
    with open(os.path.join(TOP, path), errors="replace") as f:
        return f.read()


def test_readme_shows_the_first_client(env):
    """The listing in README.md is the file that is compiled, from its main() on."""
    source = read("client/examples/first.c").split("int main", 1)[1]
    check("int main" + source.rstrip() in read("README.md"), "README.md and client/examples/first.c differ")


def test_every_key_is_in_the_manual(env):
    rc, out, _ = env.run(env.program("exl3-daemon"), "--help")
    equal(rc, 0, "--help")
    page = read("client/man/exl3-daemon.conf.5").replace("\\-", "-")
    keys = re.findall(r"^  --([a-z-]+) ", out, re.M)
    check(len(keys) > 15, f"keys: {keys}")
    for key in keys:
        check(re.search(rf"^\.BR? (.*[ \"])?{key}\b", page, re.M), f"exl3-daemon.conf.5 does not describe {key}")


def test_defaults_in_the_manual(env):
    rc, out, err = env.run(env.program("exl3-daemon"), "--help")
    equal(rc, 0, f"--help ({err})")
    page = read("client/man/exl3-daemon.conf.5").replace("\\-", "-")
    for key, default in re.findall(r"^  --([a-z-]+) .*\[([^\]\s]*)\](?: \(|$)", out, re.M):
        line = re.search(rf"^\.BR? .*\b{key} .*$", page, re.M)
        check(line and f"({default})" in line.group(0), f"exl3-daemon.conf.5: {key} is not given as ({default})")


def test_every_verb_is_in_the_manual(env):
    rc, out, _ = env.run(env.program("exl3ctl"), "--help")
    equal(rc, 0, "--help")
    page = read("client/man/exl3ctl.1").replace("\\-", "-")
    verbs = re.findall(r"^  ([a-z]+) ", out, re.M)
    check(len(verbs) >= 10, f"verbs: {verbs}")
    for verb in verbs:
        check(re.search(rf"^\.B[IR]? \"?{verb}\b", page, re.M), f"exl3ctl.1 does not describe {verb}")
    for verb in verbs:
        rc, out, _ = env.run(env.program("exl3ctl"), "help", verb)
        for option in re.findall(r"^  --([a-z0-9-]+)", out, re.M):
            check(f"--{option}" in page, f"exl3ctl.1 does not mention --{option} of {verb}")


def test_every_function_is_in_the_manual(env):
    page, exported = read("client/man/exl3.3"), re.findall(r"^\t(exl3_\w+);", read("client/libexl3.map"), re.M)
    check(len(exported) > 30, f"exported: {exported}")
    for name in exported:
        check(re.search(rf"\b{name} \(\)", page), f"exl3.3 does not mention {name}")


def test_every_file_that_is_named_exists(env):
    for path in ["README.md"] + sorted(os.path.relpath(p, TOP) for p in glob.glob(os.path.join(TOP, "docs", "*.md"))):
        text, here = read(path), os.path.dirname(os.path.join(TOP, path))
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            check(os.path.exists(os.path.join(here, target)), f"{path}: {target} does not exist")
        for name in re.findall(r"`((?:shm|proto|client|kernels|daemon|tests|bench|systemd|docs)/[\w./*@-]*)`", text):
            check(glob.glob(os.path.join(TOP, name)), f"{path}: {name} does not exist")


def test_limits_and_details_are_named_as_in_the_code(env):
    """Names in capitals that a document uses are in a header."""
    headers = "".join(read(p) for p in ("shm/exl3_abi.h", "client/exl3.h", "shm/ring.h", "kernels/format.h", "proto/exl3.proto"))
    for path in ("README.md", "docs/protocol.md", "docs/numerics.md", "docs/operations.md", "docs/architecture.md"):
        for name in re.findall(r"\bEXL3_[A-Z0-9_]+\b", read(path)):
            check(name in headers or name in ("EXL3_SOCKET", "EXL3_BACKEND_DIR", "EXL3_LIBRARY"), f"{path}: {name} is in no header")


def test_figures_are_those_of_the_csv_files(env):
    rc, out, err = env.run(sys.executable, os.path.join(TOP, "docs", "report.py"), "--check")
    equal(rc, 0, f"docs/report.py --check ({out.strip()}{err.strip()})")
