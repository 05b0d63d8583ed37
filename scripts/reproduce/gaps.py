"""The deployment gap of every preset: the sanity test, and then the accuracy of the same weights as
the sampler computes and as the learner does."""

from collections.abc import Mapping
from pathlib import Path

from experiments.runs import Entries, markdown, trained
from reproduce import policies, sanity
from reproduce.policies import Rewards

from jaxrl.core import PRESETS
from jaxrl.training.evaluate import evaluate_greedily

STEPS = 20
Run = tuple[Entries, Rewards, Rewards]  # the metrics, the sampler's rewards, the learner's


def compared(directory: Path, *, seed: int) -> dict[str, Run]:
    """Trains or reads a run for each preset, and measures its policies on held-out prompts."""
    found = dict[str, Run]()
    for preset in PRESETS:
        keys = {
            "seed": seed,
            "run_dir": directory / "gaps" / f"{preset}-{seed}",
            "model.path": directory / "base" / "model",
            "data.path": directory / "perfectible.jsonl",
            "data.eval_path": directory / "held_out.jsonl",
            "eval.every": 0,
            "train.steps": STEPS,
            "precision": preset,
        }
        entries = trained(sanity.CONFIG, keys)
        both = policies.both(sanity.CONFIG, keys, measure=evaluate_greedily)
        found[preset] = entries, *both
    return found


def table(runs: Mapping[str, Run]) -> str:
    """Formats a line for each preset, of the weights after the last step."""
    rows = []
    for preset, (entries, sampler, learner) in runs.items():
        last = [e for e in entries if "eval/deployment_gap" in e][-1]
        gap, around = (last[f"eval/deployment_gap{end}"] for end in ("", "/interval"))
        served, own = sampler[STEPS], learner[STEPS]
        more, interval = policies.difference(own, served)
        rows.append(
            {
                "precision": preset,
                "log-prob, learner - sampler": f"{gap:+.1e} ± {around:.0e}",
                "accuracy, sampler": f"{100 * served.mean():.1f}",
                "learner": f"{100 * own.mean():.1f}",
                "learner - sampler": f"{100 * more:+.1f} ± {100 * interval:.1f}",
                "prompts that differ": f"{int((own != served).any(axis=1).sum())}",
            }
        )
    return markdown(rows)
