"""Certificates: the agreement of a learner with its sampler, and what it was measured for.

The policy has not moved, so the whole log-ratio is arithmetic. A certificate says nothing about
another dtype policy, another server or another model: `Certificate.changes` names the difference.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np

from jaxrl.core.precision import ROLES, Precision, short_name
from jaxrl.diagnostics.ratio.agreement import agreement_metrics, phantom_clips
from jaxrl.diagnostics.ratio.split import LogRatio
from jaxrl.losses.algebra import Clip

KL_BAR = 0.015
"""Largest mismatch KL that passes, in nats a token: prime-rl's bar."""

PHANTOM_BAR = 1e-3
"""Largest share of tokens that rounding alone may clip."""

FEWEST_TOKENS = 1000
"""Fewest tokens that pass: among fewer, none may be clipped where one in a thousand is."""

BANDS = ((0.999, 1.002), (0.99, 1.01), (0.95, 1.05))
"""Ranges of the ratio whose shares of tokens a certificate has; the first is that of MLPerf's
sequence mask, the others are the rows of MaxText's tests."""

_BACKWARD = ("grads", "moments")  # roles of the update alone


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Agreement of learner and sampler at equal weights.

    Attributes:
      passed: True if there are no `reasons`.
      reasons: one line for each bar that was missed.
      numbers: "tokens"; "kl", E[w - log w - 1] of the ratio w of learner and sampler, in nats;
        "ratio_in_LOW_HIGH", shares of the tokens whose ratio is in one of the `BANDS`; "phantom",
        share that the clip would take; "equal", share with bitwise equal log-probs.
      facts: what was measured, by name: the roles of the dtype policy, the sampler and its version,
        the server's flags.
    """

    passed: bool
    reasons: list[str]
    numbers: dict[str, float]
    facts: dict[str, str]

    def changes(self, facts: Mapping[str, str]) -> list[str]:
        """Lists, in words, the facts that differ from `facts` now."""
        names = sorted(self.facts.keys() | facts.keys())
        return [
            f"{name} was {self.facts.get(name, 'not there')} and is {facts.get(name, 'not there')}"
            for name in names
            if self.facts.get(name) != facts.get(name)
        ]

    def to_json(self) -> str:
        """Writes the certificate as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Certificate":
        """Reads what `to_json` wrote; raises ValueError if it is not that."""
        try:
            tree = json.loads(text)
            names = [field.name for field in fields(cls)]
            if not isinstance(tree, dict) or tree.keys() != set(names):
                raise ValueError(f"expected the fields {', '.join(names)} and no others")
            for name, kind in (("passed", bool), ("reasons", list), ("facts", dict)):
                if not isinstance(tree[name], kind):
                    raise ValueError(f"{name} has another type")
            for name in ("tokens", "kl"):
                if not isinstance(dict(tree["numbers"]).get(name), int | float):
                    raise ValueError(f"numbers has no number {name}")
            return cls(**tree)
        except (TypeError, ValueError) as error:
            raise ValueError(f"it is not what `jaxrl doctor --certify` writes ({error})") from None


def certify(tokens: LogRatio, *, clip: Clip, facts: Mapping[str, str]) -> Certificate:
    """Judges the log-probs of learner and sampler at equal weights, with the clip of a recipe. The
    shadow is not read. There must be at least one token."""
    kl = agreement_metrics(tokens, low=clip.low, high=clip.high)["k3_kl"]
    ratio = np.exp(tokens.learner - tokens.sampler)
    phantom = phantom_clips(tokens, clip)["phantom"]
    numbers = {"tokens": len(ratio), "kl": kl}
    for lowest, highest in BANDS:
        share = np.mean((ratio >= lowest) & (ratio <= highest))
        numbers[f"ratio_in_{lowest:g}_{highest:g}"] = float(share)
    numbers |= {"phantom": phantom, "equal": float(np.mean(tokens.learner == tokens.sampler))}
    reasons = []
    if len(ratio) < FEWEST_TOKENS:
        reasons.append(
            f"{len(ratio)} tokens cannot show a share of {100 * PHANTOM_BAR:g} %: sample at least "
            f"{FEWEST_TOKENS}, with more prompts, completions or sampling.max_tokens"
        )
    if not kl <= KL_BAR:  # NaN does not pass
        reasons.append(f"the mismatch KL is {kl:.2g} nats a token, and at most {KL_BAR} pass")
    if not phantom <= PHANTOM_BAR:
        reasons.append(
            f"rounding alone clips {100 * phantom:.2g} % of the tokens at a clip of {clip}, "
            f"and at most {100 * PHANTOM_BAR:g} % pass"
        )
    return Certificate(passed=not reasons, reasons=reasons, numbers=numbers, facts=dict(facts))


def forward_facts(precision: Precision | str) -> dict[str, str]:
    """Names the roles of a dtype policy that a forward pass depends on, each with its value."""
    precision = Precision.of(precision)
    roles = {r: short_name(getattr(precision, r)) for r in ROLES if r not in _BACKWARD}
    settings = {name: getattr(precision, name) for name in ("products", "sums", "latent", "blocks")}
    return {f"precision.{name}": value for name, value in (roles | settings).items()}
