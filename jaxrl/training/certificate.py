"""The check of a run against the certificate in its directory."""

import shlex
from collections.abc import Collection

from jaxrl.builders.certificate import NAME, certified_facts, never_certified
from jaxrl.builders.model import ModelFiles, choose_kernel
from jaxrl.builders.sampler import Serving
from jaxrl.config import toml_file
from jaxrl.config.bucket import local_directory
from jaxrl.config.doctor import DoctorConfig, DoctorDataConfig, DoctorSamplingConfig
from jaxrl.config.training import Config
from jaxrl.core import read_whole
from jaxrl.diagnostics import Certificate
from jaxrl.losses import Clip
from jaxrl.models import Kernel
from jaxrl.sharding import Layout


class CertificateError(ValueError):
    """The run directory's certificate does not hold for the run."""


def check_certificate(
    config: Config, serving: Serving, *, models: ModelFiles, layout: Layout, clips: Collection[Clip]
) -> str | None:
    """Compares a run with the certificate in its directory. `layout` is the learner's; `clips` are
    the loss's, and without one the certificate's own is not compared.

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
    model = models.policy.config
    attention = choose_kernel(config, model, layout=layout)
    again = _advice(config, clips, attention=attention)
    try:
        certificate = Certificate.from_json(text)
    except ValueError as error:
        raise CertificateError(f"{path} cannot be read: {error}; {again}") from None
    facts = certified_facts(
        serving.facts(),
        config.precision,
        model=model,
        mesh=config.mesh,
        attention=attention,
        clips=clips,
        keys=toml_file.flatten(config),
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


def _advice(config: Config, clips: Collection[Clip], *, attention: Kernel) -> str:
    if reasons := never_certified(config, clips):
        return f"{' and '.join(reasons)} cannot be certified: delete the file to train without"
    command = certifying_command(config, clips, attention=attention)
    return f"certify again ({command}), or delete the file to train without"


def certifying_command(config: Config, clips: Collection[Clip], *, attention: Kernel) -> str:
    """Returns the command line that certifies a run, with every key that its arithmetic depends on
    and that is not the doctor's default."""
    data = config.data.model_dump(include=set(DoctorDataConfig.model_fields))
    tree = {
        "model": config.model.model_dump(),
        "data": data,
        "sampling": config.sampling.model_dump(include=set(DoctorSamplingConfig.model_fields)),
        "sampler": config.sampler.model_dump(),
        "mesh": config.mesh.model_dump(),
        "precisions": [config.precision.text],
        "microbatch_tokens": config.train.microbatch_tokens,
        "attention": attention,
        "out": str(local_directory(config.run_dir)),
    }
    for clip in clips:
        tree |= {"clip_range": (clip.low, clip.high), "clip_unit": clip.unit}
    asked = toml_file.validate(DoctorConfig, tree)
    options = toml_file.arguments(asked, without=("model.path", "precisions"))
    given = ["--certify", "--precisions", config.precision.text]
    return shlex.join(["jaxrl", "doctor", config.model.path, *given, *options])
