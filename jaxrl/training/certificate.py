"""The check of a run against the certificate in its directory."""

from collections.abc import Collection

from jaxrl.builders.certificate import NAME, certified_facts, never_certified
from jaxrl.builders.model import ModelFiles
from jaxrl.builders.sampler import Serving
from jaxrl.config.bucket import local_directory
from jaxrl.config.toml_file import flatten
from jaxrl.config.training import Config
from jaxrl.core import read_whole
from jaxrl.diagnostics import Certificate
from jaxrl.losses import Clip


class CertificateError(ValueError):
    """The run directory's certificate does not hold for the run."""


def check_certificate(
    config: Config, serving: Serving, *, models: ModelFiles, clips: Collection[Clip]
) -> str | None:
    """Compares a run with the certificate in its directory. `clips` are the loss's; without one the
    certificate's own is not compared.

    Returns:
      A line that tells what was certified; None without a certificate.

    Raises:
      CertificateError: for a certificate that was not passed, was made of something else, or cannot
        be read; the message names the differences and the remedy.
    """
    path = local_directory(config.run_dir) / NAME
    text = read_whole(path)
    if text is None:
        return None
    again = _advice(config, clips)
    try:
        certificate = Certificate.from_json(text)
    except ValueError as error:
        raise CertificateError(f"{path} cannot be read: {error}; {again}") from None
    sampler, model = serving.facts(), models.policy.config
    facts = certified_facts(
        sampler, config.precision, model=model, clip=min(clips, default=None), keys=flatten(config)
    )
    if not clips and "clip" in certificate.facts:
        facts["clip"] = certificate.facts["clip"]
    if changes := certificate.changes(facts):
        raise CertificateError(f"{path} does not hold here: {'; '.join(changes)}; {again}")
    if not certificate.passed:
        raise CertificateError(
            f"{path} was not passed: {'; '.join(certificate.reasons)}. Change precision or the "
            f"server's settings (docs/precision.md lists cures) and {again}"
        )
    numbers = certificate.numbers
    return (
        f"{path}: the mismatch KL was {numbers['kl']:.2g} nats over {numbers['tokens']:.0f} tokens;"
        " precision and sampler are as certified"
    )


def _advice(config: Config, clips: Collection[Clip]) -> str:
    if reasons := never_certified(config, clips):
        return f"{' and '.join(reasons)} cannot be certified: delete the file to train without"
    sampler = "" if config.sampler.name == "embedded" else f" --sampler {config.sampler.name}"
    if config.sampler.url:
        sampler = f" --server {config.sampler.url[0]}"
    clip = "".join(
        f" --clip_range {low:.6g},{high:.6g} --clip_unit {unit}" for low, high, unit in clips
    )
    return (
        f"certify again (jaxrl doctor {config.model.path} --certify --out "
        f"{local_directory(config.run_dir)} "
        f"--precisions {config.precision.text}{sampler}{clip}), or delete the file to train without"
    )
