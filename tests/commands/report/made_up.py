"""Runs with known numbers."""

import json

QUANTILES = ("min", "p10", "p50", "p90", "max")
TIMES = ("sample", "reward", "score", "update", "publish")


def entry(step, *, slope):
    return {
        "step": step,
        "time": float(step),
        "reward": slope * step,
        "kl": 0.01 * step,
        "kl/reference": 0.01 * step,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "loss": None,
        "clip/low": 0.01,
        "clip/high": 0.02,
        "diversity/distinct": 0.9,
        "entropy/sampled": 1.0,
        "tokens_per_second": 1000.0,
        **{f"reward/{q}": slope * step + i for i, q in enumerate(QUANTILES)},
        **{f"completion_length/{q}": 10 + i for i, q in enumerate(QUANTILES)},
        **{f"time/{name}": 0.1 for name in TIMES},
        "time/step": 1.5,
        **({"probe/alpha_std": 0.1 * step, "probe/beta_std": 0.01} if step % 10 == 1 else {}),
        **({"probe/phantom": 0.02, "probe/clipped": 0.05} if step % 10 == 1 else {}),
    }


ALARM = {"alarm": "kl_spike", "at": 20, "action": "log", "value": 0.2, "limit": 0.1}
SAMPLE = {
    "step": 11,
    "group": 7,
    "prompt": "2+2=</script><b>",
    "answer": "4",
    "reward": 1.0,
    "parts": {"exact": 1.0, "brevity": -0.5},
    "length": 3,
    "truncated": False,
    "tokens": ["4", " ", "<end>"],
    "advantages": [0.5, -0.25, None],
    "probabilities": [0.9, 0.25, None],
    "entropies": [0.2, 1.5, None],
    "betas": [0.001, -0.02, None],
}


def write(path, entries):
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
