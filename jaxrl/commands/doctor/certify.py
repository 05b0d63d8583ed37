"""The certificate of `jaxrl doctor --certify`."""

from collections.abc import Callable
from pathlib import Path

from jaxrl.builders.certificate import NAME
from jaxrl.commands.doctor.measure import examine, only_precision
from jaxrl.config.doctor import DoctorConfig
from jaxrl.core import write_whole
from jaxrl.diagnostics import BANDS, Certificate, certify as judge
from jaxrl.losses import Clip


def certify(config: DoctorConfig, *, note: Callable[[str], None]) -> int:
    """Measures the config's one precision, writes the certificate and prints it; the exit status
    is 0 if it passes, else 3.

    Raises:
      ConfigError: unless the config names one precision.
      ValueError, ServerFailedError, RefusedError: as `examine`.
    """
    only_precision(config, "--certify")
    untimed = config.model_copy(update={"timed_steps": 0})
    (measured,) = examine(untimed, note=note, facts=True)
    certificate = judge(measured.ratio, clip=config.clip, facts=measured.facts)
    path = Path(config.out, NAME)
    write_whole(path, certificate.to_json())
    print(f"{measured.precision}, {measured.sampler}: {_lines(certificate, config.clip)}")
    print(path)
    return 0 if certificate.passed else 3


def _lines(certificate: Certificate, clip: Clip) -> str:
    n = certificate.numbers
    verdict = "passed" if certificate.passed else f"not passed: {'; '.join(certificate.reasons)}"
    shares = [f"ratio in [{a:g}, {b:g}]" for a, b in BANDS]
    rows = [("tokens", f"{n['tokens']:.0f}"), ("mismatch KL, nats a token", f"{n['kl']:.2e}")]
    rows += [
        (text, _percent(n[f"ratio_in_{a:g}_{b:g}"]))
        for text, (a, b) in zip(shares, BANDS, strict=True)
    ]
    rows += [(f"phantom clips at {clip}", _percent(n["phantom"]))]
    rows += [("bitwise equal", _percent(n["equal"]))]
    width = max(len(name) for name, _ in rows)
    return "\n".join([verdict, *(f"  {name.ljust(width)}  {value}" for name, value in rows)])


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
