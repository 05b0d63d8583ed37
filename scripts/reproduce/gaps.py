"""The deployment gap: runs, and then the accuracy of the same weights as the sampler computes and
as the learner does. The sampler is the embedded one, in every preset, or a vLLM server."""

from collections.abc import Mapping
from pathlib import Path

from experiments.runs import CONFIGS, Entries, markdown, trained
from reproduce import policies, sanity
from reproduce.policies import Rewards

from jaxrl.core import PRESETS
from jaxrl.training.evaluate import evaluate_greedily

STEPS = 20
SERVED = ("fp32", "bf16_master", "phantom", "fp16_master")  # phantom: an f32 learner, a bf16 server
GAP = ("eval/deployment_gap", "eval/deployment_gap/interval")
Run = tuple[Entries, Rewards, Rewards]  # the metrics, the sampler's rewards, the learner's


def compared(directory: Path, *, seed: int) -> dict[str, Run]:
    """Trains or reads the sanity test in each preset, and measures its policies on held-out
    prompts."""
    found = dict[str, Run]()
    for preset in PRESETS:
        keys = _keys(directory, preset, run_dir=directory / "gaps" / f"{preset}-{seed}", seed=seed)
        keys |= {"data.path": directory / "perfectible.jsonl", "eval.every": 0}
        entries = trained(sanity.CONFIG, keys)
        found[preset] = entries, *policies.both(sanity.CONFIG, keys, measure=evaluate_greedily)
    return found


def served(directory: Path, *, seed: int) -> dict[str, Run]:
    """Trains or reads the quickstart against a vLLM server, and measures its policies: as the
    server computes, and as an embedded sampler with the learner's dtypes does."""
    file, found = CONFIGS / "quickstart_vllm.toml", dict[str, Run]()
    for preset in SERVED:
        run_dir = directory / "served" / f"{preset}-{seed}"
        keys = _keys(directory, preset, run_dir=run_dir, seed=seed)
        keys |= {"data.path": directory / "train.jsonl"}
        entries = trained(file, keys)
        found[preset] = entries, *policies.both(file, keys, measure=evaluate_greedily)
    return found


def _keys(directory: Path, preset: str, *, run_dir: Path, seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "run_dir": run_dir,
        "model.path": directory / "base" / "model",
        "data.eval_path": directory / "held_out.jsonl",
        "train.steps": STEPS,
        "precision": preset,
    }


def table(runs: Mapping[str, Run]) -> str:
    """Formats a line for each precision: how much higher the learner's log-prob is at every
    evaluation, and the accuracies after the last step."""
    rows = []
    for preset, (entries, sampler, learner) in runs.items():
        gaps = {e["step"]: tuple(map(e.get, GAP)) for e in entries if GAP[0] in e}
        served, own = sampler[STEPS], learner[STEPS]
        more, interval = policies.difference(own, served)
        row = {"precision": preset}
        row |= {f"log-prob, step {s}": f"{x:+.1e} ± {y:.0e}" for s, (x, y) in gaps.items()}
        row |= {
            "accuracy, sampler": f"{100 * served.mean():.1f}",
            "learner": f"{100 * own.mean():.1f}",
            "learner - sampler": f"{100 * more:+.1f} ± {100 * interval:.1f}",
        }
        row |= {
            f"differ, step {s}": f"{int((learner[s] != sampler[s]).any(axis=1).sum())}"
            for s in learner
        }
        rows.append(row)
    return markdown(rows)
