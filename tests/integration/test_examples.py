# SPDX-License-Identifier: Apache-2.0
"""The example clients: the README's first one, and two language models against their references."""
import json
import os
import re
import subprocess

import exl3ref as ref
from harness import WAIT, check, equal

LOGITS_TOL = 0.05
NLL_TOL = 0.0025  # 0.01 of a perplexity around 3.5 is 0.0028
TIGHT = 0.02  # margin below which a greedy byte may differ


def reference(env, model):
    with open(os.path.join(env.model(model), "reference.json")) as f:
        return json.load(f)


def example(env, d, name, *args, timeout=200):
    rc, out, err = env.run(env.program(f"examples/{name}"), "--socket", d.sock, *args, timeout=timeout)
    check(rc == 0, f"{name} {args[0]}: status {rc}, {err.strip()}")
    return out


def number(text, key):
    found = re.search(rf"{key}=([-+.0-9einfa]+)", text)
    check(found, f"no {key} in {text!r}")
    return float(found.group(1))


def both(env):
    return (("tiny_llama", "tiny-llama", []), ("tiny_llama", "tiny-llama", ["--unfused", "--batch", "7"]),
            ("tiny_deepseek", "tiny-deepseek", []), ("tiny_deepseek", "tiny-deepseek", ["--batch", "5"]))


def test_logits(env):
    d = env.shared()
    for program, model, args in both(env):
        prompt = reference(env, model)["logits"]["prompt"]
        out = example(env, d, program, "logits", "--prompt", prompt, "--file",
                      os.path.join(env.model(model), "logits.f32"), *args)
        equal(number(out, "rows"), 32, f"{model}: positions")
        check(number(out, "largest_difference") <= LOGITS_TOL, f"{model} {args}: {out.strip()}")


def test_greedy_text(env):
    """Equal to the reference up to the first step that was nearly a tie."""
    d = env.shared()
    for program, model, _ in both(env)[::2]:
        for case in reference(env, model)["greedy"]:
            sure = next((i for i, m in enumerate(case["margin"]) if m < TIGHT), len(case["margin"]))
            out = example(env, d, program, "generate", "--prompt", case["prompt"], "--tokens", str(sure))
            want = bytes(case["quantized_bytes"][:sure]).decode(errors="replace")
            check(sure >= 3 and out.startswith(case["prompt"] + want),
                  f"{model}: {out!r} does not begin with {case['prompt'] + want!r}")


def test_perplexity(env):
    d = env.shared()
    windows = 1 if env.short else 4  # the demo has all of them
    for program, model, _ in both(env)[::2]:
        nll = reference(env, model)["window_nll"]["quantized"][:windows]
        out = example(env, d, program, "perplexity", "--text", os.path.join(env.model(model), "heldout.txt"),
                      "--windows", str(windows))
        equal(number(out, "windows"), windows, f"{model}: windows")
        want = sum(nll) / windows
        check(abs(number(out, "nll") - want) < NLL_TOL, f"{model}: {out.strip()}, expected nll {want:.6f}")


def test_sampling_is_repeatable(env):
    d = env.shared()
    args = ["generate", "--prompt", "The ", "--tokens", "40", "--temperature", "0.8"]
    first = example(env, d, "tiny_llama", *args, "--seed", "7")
    equal(example(env, d, "tiny_llama", *args, "--seed", "7"), first, "same seed")
    check(example(env, d, "tiny_llama", *args, "--seed", "8") != first, "another seed gives the same text")


def test_several_at_once(env):
    """Five processes, two models: each writes what it writes alone."""
    d = env.shared()
    tokens = "30" if env.short else "60"
    jobs = [("tiny_llama", "The history of the town"), ("tiny_deepseek", "The history of the town"),
            ("tiny_llama", "A bridge"), ("tiny_deepseek", "A bridge"), ("tiny_llama", "Once upon a time")]
    alone = [example(env, d, p, "generate", "--prompt", t, "--tokens", tokens) for p, t in jobs]
    procs = [env.spawn(env.program(f"examples/{p}"), "--socket", d.sock, "generate", "--prompt", t, "--tokens", tokens,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for p, t in jobs]
    for proc, want, (program, _) in zip(procs, alone, jobs):
        out, err = proc.communicate(timeout=WAIT * 2)
        equal(proc.returncode, 0, f"{program} ({err.strip()})")
        equal(out, want, f"{program}: text beside others")


def test_first_client(env):
    d = env.shared()
    name = "model.layers.0.self_attn.q_proj"
    out = example_first(env, d, "tiny-llama", name)
    tensors = ref.load(os.path.join(env.model("tiny-llama"), "model.safetensors"))
    want = ref.Matrix(tensors, name).apply([1.0] * 384)[0]
    check(abs(float(out.split("=")[1]) - want) < 1e-3, f"{out.strip()}, expected {want:.6f}")
    rc, _, err = env.run(env.program("examples/first"), "tiny-llama", "nonesuch", env=dict(os.environ, EXL3_SOCKET=d.sock))
    check(rc == 1 and "nonesuch" in err, f"no such module: status {rc}, {err}")


def example_first(env, d, *args):
    rc, out, err = env.run(env.program("examples/first"), *args, env=dict(os.environ, EXL3_SOCKET=d.sock))
    equal(rc, 0, f"first ({err.strip()})")
    return out


def test_merged_requests(env):
    """Rows of several clients in one launch: each client's logits stay right."""
    d = env.daemon([f"{m}={env.model(m)}" for m in ("tiny-llama", "tiny-deepseek")], ["--merge-max", "16"])
    procs = []
    for i in range(3):
        for program, model, _ in both(env)[::2]:
            procs.append((model, env.spawn(
                env.program(f"examples/{program}"), "--socket", d.sock, "logits", "--prompt",
                reference(env, model)["logits"]["prompt"], "--file", os.path.join(env.model(model), "logits.f32"),
                "--batch", str(1 + i), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
    for model, proc in procs:
        out, err = proc.communicate(timeout=2 * WAIT)
        equal(proc.returncode, 0, f"{model} ({err.strip()})")
        check(number(out, "largest_difference") <= LOGITS_TOL, f"{model}: {out.strip()}")
