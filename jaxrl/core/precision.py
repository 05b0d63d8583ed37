"""Dtype policies: every dtype of a run, and the arithmetic of its products, is named here.

A `Precision` is frozen and hashable, so it can be a static argument of a compiled function. Its
text is one line, in a config file as in a run directory::

    >>> str(parse("bf16_master"))
    'params=f32,compute=bf16,activations=bf16,logits=f32,grads=f32,moments=f32,wire=bf16,...'
    >>> parse("bf16_master,wire=f32").wire
    dtype('float32')
    >>> dataclasses.replace(parse("fp32"), logits=jnp.bfloat16) == parse("fp32,logits=bf16")
    True

Public functions of jaxrl also take the text itself: `precision="bf16_master"`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.loss_scale import LossScaleSpec, dynamic_loss_scale, parse_loss_scale
from jaxrl.core.names import nearest

DType = np.dtype
"""The dtype of a role, such as `jnp.dtype("bfloat16")`."""

_DTYPES: dict[str, DType] = {
    "f64": jnp.dtype(jnp.float64),
    "f32": jnp.dtype(jnp.float32),
    "bf16": jnp.dtype(jnp.bfloat16),
    "f16": jnp.dtype(jnp.float16),
    "f8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
}
_SHORT = {dtype: name for name, dtype in _DTYPES.items()}

# "fixed": no sum of the forward pass depends on the other rows of the batch, or on its shape.
SUMS = ("any", "fixed")
LATENT = ("expanded", "sampler", "absorbed")  # forms of multi-head latent attention
# Operands in 8 bits: none, both, or activations alone, for weights in E4M3 rounded before.
BLOCKS = ("none", "e4m3", "int8", "rows")

_Algorithm = jax.lax.DotAlgorithmPreset

# How a product of f32 operands is computed, and the platforms with units for it. "exact" keeps
# every bit of the operands: f32 units on CPU and GPU, six passes of bf16 parts on TPU. A CPU
# emulates the others, see `models.products`.
PRODUCTS: dict[str, tuple[Any, frozenset[str]]] = {
    "exact": (jax.lax.Precision.HIGHEST, frozenset({"cpu", "gpu", "tpu"})),
    "bf16x9": (_Algorithm.BF16_BF16_F32_X9, frozenset({"gpu"})),
    "bf16x6": (_Algorithm.BF16_BF16_F32_X6, frozenset({"gpu", "tpu"})),
    "bf16x3": (_Algorithm.BF16_BF16_F32_X3, frozenset({"gpu", "tpu"})),
    "bf16": (_Algorithm.BF16_BF16_F32, frozenset({"gpu", "tpu"})),
    "tf32x3": (_Algorithm.TF32_TF32_F32_X3, frozenset({"gpu"})),
    "tf32": (_Algorithm.TF32_TF32_F32, frozenset({"gpu"})),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype policy of one run.

    Each role takes a dtype, a scalar type such as jnp.bfloat16, or a short name; `loss_scale` takes
    a spec or its text.

    Example:
      >>> roles = dict.fromkeys(ROLES, jnp.float32) | {"wire": "bf16"}
      >>> Precision(**roles, loss_scale="static:8") == parse("fp32,wire=bf16,loss_scale=static:8")
      True

    Attributes:
      params: master weights and the optimizer's update.
      compute: weights and operands of every matrix product of the forward and backward pass. All
        products accumulate in f32 (f64 if `compute` is f64).
      activations: the residual stream and the values between two matrix products.
      logits: the head's output and the log-probs made of it. The sums of the softmax, ratios and
        reductions of a loss always have at least f32.
      grads: gradient accumulation over microbatches and reduction over devices.
      moments: optimizer moments; not f16, in which the squares of small gradients are 0. In bf16 a
        decay above .996, such as Adam's .999, rounds to 1.
      wire: the weights that are published to the sampler. f8_e4m3 is for this role alone, and for
        the embedded sampler: weights rounded to 8 bits, as engines with quantised weights have.
      sampler: operands and activations of the sampler.
      products: how products of f32 operands are computed, in the learner and the sampler. "exact"
        drops no bit of an operand. The others are names of JAX's dot algorithms: "bf16x9",
        "bf16x6", "bf16x3", "bf16", "tf32x3" and "tf32". Products of other operands are exact.
      sums: the order of additions. "fixed": the log-probs of a sequence do not depend on the rest
        of its batch, and the embedded sampler's are the learner's, bit for bit, if sequences are
        packed with `sequence_alignment`. On a mesh the rules are those of `sharding.by_rows`.
        "any": XLA chooses, which is faster on CPU.
      latent: form of attention, see `models.latent`. "expanded", "absorbed" (the sampler's cache is
        narrow), or "sampler": "absorbed" in the sampler alone.
      blocks: operands of projections and feed-forward networks in 8 bits, in learner and sampler
        alike. "e4m3": numbers of E4M3 that share factors, see `core.blocks`; "rows": activations
        alone, which is what a sampler's program computes with weights that `as_served` rounded.
        "int8": integers, as vLLM serves them on CPUs, see `models.integers`.
      loss_scale: the scale of the loss before the backward pass.
      text: the line that it was read from, or `str` of it. Equal policies may differ in it.

    Raises:
      ValueError: for a role that cannot have its dtype; the message names role, value and dtypes.
    """

    params: DType
    compute: DType
    activations: DType
    logits: DType
    grads: DType
    moments: DType
    wire: DType
    sampler: DType
    products: str = "exact"
    sums: str = "any"
    latent: str = "expanded"
    blocks: str = "none"
    loss_scale: LossScaleSpec = dataclasses.field(default_factory=LossScaleSpec)
    text: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for role in ROLES:
            dtype = _as_dtype(getattr(self, role), role=role)
            object.__setattr__(self, role, dtype)
            if role != "wire" and dtype.itemsize == 1:
                raise ValueError(
                    f"{role}={_SHORT[dtype]}: nothing is computed in 8 bits; use another dtype, or "
                    "give 8 bits to wire alone"
                )
        if self.moments == np.dtype(np.float16):
            raise ValueError(
                "moments=f16: squares of gradients below 2e-4 are 0 in f16, and steps are then "
                "hundreds of times too large; use f32 or bf16"
            )
        for name, known, kind in (
            ("products", PRODUCTS, "a way to compute products"),
            ("sums", SUMS, "an order"),
            ("latent", LATENT, "a form"),
            ("blocks", BLOCKS, "a kind of blocks"),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} is not {kind}; use one of {', '.join(known)}")
        if self.latent == "sampler" and self.sums == "fixed":
            raise ValueError(
                "latent=sampler and sums=fixed: two forms of attention round differently; use "
                "latent=absorbed, or leave one of them out"
            )
        f32 = np.dtype(np.float32)
        for role in ("compute", "sampler"):
            dtype = getattr(self, role)
            if self.blocks in ("e4m3", "rows") and dtype not in (f32, jnp.bfloat16):
                raise ValueError(
                    f"blocks={self.blocks} and {role}={_SHORT[dtype]}: a number times its factor "
                    "is exact in bf16 and f32 only; use one of them, or leave blocks out"
                )
        if self.products != "exact" and f32 not in (self.compute, self.sampler):
            raise ValueError(
                f"products={self.products} is for f32 operands, but compute="
                f"{_SHORT[self.compute]} and sampler={_SHORT[self.sampler]}; leave products out or "
                "use compute=f32"
            )
        if isinstance(self.loss_scale, str):
            object.__setattr__(self, "loss_scale", parse_loss_scale(self.loss_scale))
        object.__setattr__(self, "text", str(self))

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """Reads a dtype policy from one line; see `parse`."""
        return parse(text)

    @classmethod
    def of(cls, given: "Precision | str") -> "Precision":
        """Returns a dtype policy that is given as an object or as its text.

        Example:
          >>> Precision.of("fp32") == Precision.of(parse("fp32")) == parse("fp32")
          True

        Raises:
          ValueError: as `parse`; also for a value of another type.
        """
        if isinstance(given, str):
            return parse(given)
        if not isinstance(given, cls):
            raise ValueError(f"{given!r} is not a dtype policy; give its text, such as 'fp32'")
        return given

    @property
    def exported(self) -> DType:
        """Dtype of a trained model's files: `wire`, or `sampler` if `wire` has 8 bits."""
        return self.wire if self.wire.itemsize > 1 else self.sampler

    def __str__(self) -> str:
        fields = [(role, _SHORT[getattr(self, role)]) for role in ROLES]
        fields += [(name, str(getattr(self, name))) for name in _SETTINGS]
        return ",".join(f"{k}={v}" for k, v in fields)

    @property
    def accumulate(self) -> DType:
        """Dtype that matrix products accumulate in and return before the cast to `activations`."""
        return jnp.promote_types(self.compute, jnp.float32)

    def rounded(self, x: jax.Array, module: str) -> jax.Array:
        """Rounds what a module of the model hands on to `activations`. `diagnostics.attribution`
        has policies that round the results of some modules further."""
        return x.astype(self.activations)

    def inside(self, module: str) -> "Precision":
        """Returns the policy of the arithmetic inside a module: this one, here."""
        return self

    @property
    def algorithm(self) -> Any:
        """The `precision` argument of every product."""
        return PRODUCTS[self.products if self.compute == jnp.float32 else "exact"][0]

    @property
    def bf16_passes(self) -> int:
        """Products of bf16 operands that units for bf16 alone, such as a TPU's, compute one product
        with; 0 for operands of f64, which they cannot compute."""
        if self.compute == jnp.float32 and self.products != "exact":
            return int(self.products.partition("x")[2] or 1)
        # Two parts of bf16 hold every bit of an f16, three of an f32; of the products of two parts
        # XLA leaves out the smallest.
        return {"bf16": 1, "f16": 3, "f32": 6}.get(_SHORT[self.compute], 0)


def _as_dtype(value: Any, *, role: str) -> DType:
    if isinstance(value, str):
        dtype = _DTYPES.get(value)
    elif isinstance(value, type) and value is not float:  # numpy's float is f64, jax's f32
        dtype = np.dtype(value)
    else:
        dtype = value
    if not (isinstance(dtype, np.dtype) and dtype in _SHORT):
        raise ValueError(
            f"{role}={value!r} is not a dtype; dtypes are {', '.join(_DTYPES)}, or types such as "
            "jnp.bfloat16"
        )
    return dtype


def short_name(dtype: DType) -> str:
    """Returns f32, bf16, f16, f64 or f8_e4m3.

    Example:
      >>> short_name(jnp.dtype(jnp.bfloat16))
      'bf16'
    """
    return _SHORT[dtype]


_SETTINGS = ("products", "sums", "latent", "blocks", "loss_scale")
ROLES = tuple(f.name for f in dataclasses.fields(Precision) if f.init and f.name not in _SETTINGS)

_F32: dict[str, Any] = dict.fromkeys(ROLES, "f32")
_FP32 = Precision(**_F32)
_changed = functools.partial(dataclasses.replace, _FP32)  # also takes the names of dtypes
_BF16 = dict.fromkeys(("compute", "activations", "wire", "sampler"), "bf16")
_F16 = dict.fromkeys(_BF16, "f16")

PRESETS: dict[str, Precision] = {
    "fp32": _FP32,
    # Everything but reductions and moments in bf16: the smallest memory, the largest mismatch.
    "bf16": _changed(**_BF16, params="bf16", grads="bf16"),
    # f32 master weights, bf16 everywhere that the sampler computes in bf16: a matched pair.
    "bf16_master": _changed(**_BF16),
    # f32 master weights, f16 on both sides with dynamic loss scaling (arXiv:2510.26788).
    "fp16_master": _changed(**_F16, loss_scale=dynamic_loss_scale()),
    # f32 trainer and bf16 sampler: the mismatch that causes phantom clipping, for experiments.
    "phantom": _changed(wire="bf16", sampler="bf16"),
}
"""Policies by name."""


def parse(text: str) -> Precision:
    """Reads a preset's name, a preset with changes, or a full list of roles.

    Example:
      >>> precision = parse("fp16_master,logits=bf16,loss_scale=dynamic:1024")
      >>> precision.compute, precision.logits, str(precision.loss_scale)
      (dtype('float16'), dtype(bfloat16), 'dynamic:1024:400')
      >>> parse(str(precision)) == precision
      True

    Raises:
      ValueError: for an unknown preset, role or dtype, a role given twice, or a role that is
        missing from a full list; the message lists the known names.
    """
    first, *rest = (part.strip() for part in text.split(","))
    assignments = rest if "=" not in first else [first, *rest]
    if "=" not in first and first not in PRESETS:
        near = nearest(first, PRESETS)
        hint = f" (did you mean {near}?)" if near else ""
        raise ValueError(
            f"there is no preset {first!r}{hint}; presets are {', '.join(PRESETS)}, or name every "
            f"role: {', '.join(f'{r}=f32' for r in ROLES)}"
        )
    changes: dict[str, Any] = {}
    for part in assignments:
        role, _, value = part.partition("=")
        if role in changes:
            raise ValueError(f"precision={text!r}: {role} is given twice; give it once")
        if role not in (*ROLES, *_SETTINGS):
            known = ", ".join((*ROLES, *_SETTINGS))
            raise ValueError(f"precision={text!r}: there is no role {role!r}; roles are {known}")
        changes[role] = value
    missing = [role for role in ROLES if role not in changes]
    if first not in PRESETS and missing:
        raise ValueError(
            f"precision={text!r}: without a preset every role must be named; "
            f"missing: {', '.join(missing)}"
        )
    found = dataclasses.replace(PRESETS.get(first, _FP32), **changes)
    object.__setattr__(found, "text", text)
    return found


def check_products(precision: Precision | str, platform: str, *, devices: int = 1) -> None:
    """Checks that a platform, such as "cpu", "cuda" or "tpu", can compute a dtype policy's products
    in a program over this number of devices, and that JAX, which has 64 bits only if it is told to,
    has its dtypes; raises ValueError, with the remedy, if not."""
    precision = Precision.of(precision)
    wide = [role for role in ROLES if getattr(precision, role) == np.float64]
    if wide and jnp.result_type(float) != np.float64:
        raise ValueError(f"precision: {wide[0]}=f64 needs JAX_ENABLE_X64=1; set it, or use f32")
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    if platform not in PRODUCTS[precision.products][1] | {"cpu"}:
        able = ", ".join(name for name, (_, there) in PRODUCTS.items() if platform in there)
        raise ValueError(
            f"precision: products={precision.products} cannot be computed on platform "
            f"{platform!r}; use one of {able}"
        )
    if devices > 1 and precision.products != "exact":
        # XLA's partitioner drops the algorithm of a product that it divides.
        raise ValueError(
            f"precision: XLA cannot divide products={precision.products} over {devices} devices; "
            "use exact, or one device"
        )


def sampler_precision(precision: Precision | str) -> Precision:
    """Returns the dtype policy of a forward pass that computes as the sampler does: operands and
    activations in `sampler`, log-probs in `logits`. Its weights are those of `as_served`.

    Example:
      >>> phantom = parse("phantom")
      >>> phantom.compute, sampler_precision(phantom).compute
      (dtype('float32'), dtype(bfloat16))
    """
    precision = Precision.of(precision)
    return dataclasses.replace(
        precision,
        params=precision.exported,
        compute=precision.sampler,
        activations=precision.sampler,
        products=precision.products if precision.sampler == jnp.float32 else "exact",
        latent="absorbed" if precision.latent == "sampler" else precision.latent,
        blocks="rows" if precision.blocks == "e4m3" else precision.blocks,
        loss_scale=LossScaleSpec(),
    )


def disagreement(precision: Precision | str) -> str | None:
    """Describes the difference between the forward passes of learner and sampler, and the remedy;
    None if both compute with the same weights in the same dtypes.

    Example:
      >>> disagreement("bf16_master") is None
      True
      >>> print(disagreement("bf16_master,activations=f32"))
      activations = f32 and sampler = bf16, so that ratios measure arithmetic (phantom clipping).
      Use precision = 'bf16' or 'bf16_master', or the ratio shadowed
    """
    precision = Precision.of(precision)
    differing, reasons = _differing(precision), []
    if precision.latent == "sampler":
        reasons = [
            "latent = sampler: only the sampler's attention is absorbed, a beta with a standard "
            "deviation near .014 in bf16, .002 in f16, 1e-6 in f32. Use latent=absorbed"
        ]
    if differing:
        roles = ", ".join(f"{role} = {_SHORT[getattr(precision, role)]}" for role in differing)
        same_sampler = {k: p for k, p in PRESETS.items() if p.sampler == precision.sampler}
        matched = " or ".join(repr(k) for k, p in same_sampler.items() if not _differing(p))
        reasons.append(
            f"{roles} and sampler = {_SHORT[precision.sampler]}, so that ratios measure arithmetic "
            f"(phantom clipping). Use precision = {matched}, or the ratio shadowed"
        )
    return "; ".join(reasons) or None


def _differing(precision: Precision) -> list[str]:
    sampler = precision.sampler
    roles = [r for r in ("compute", "activations") if getattr(precision, r) != sampler]
    # A wire that cannot hold the sampler's numbers is a rounding that the learner lacks.
    wire = precision.wire
    holds = wire.itemsize > 1 and jnp.promote_types(wire, sampler) == wire
    return roles if holds else [*roles, "wire"]
