from . import lora as lora
from .attention.blocks import sequence_alignment as sequence_alignment
from .attention.kernels import (
    Kernel as Kernel,
    Wanted as Wanted,
    attend_by as attend_by,
    choose_kernel as choose_kernel,
    reserves_by_run as reserves_by_run,
    unshared_reason as unshared_reason,
    verify_kernel as verify_kernel,
)
from .components import (
    ClampedGate as ClampedGate,
    Experts as Experts,
    Group as Group,
    Kind as Kind,
    Latent as Latent,
    Linear as Linear,
)
from .families import FAMILIES as FAMILIES, DecoderConfig as DecoderConfig
from .head_chunks import Chunk as Chunk, position_chunks as position_chunks
from .latent import check_form as check_form
from .linear_attention import NOT_SHARED as NOT_SHARED
from .logprobs import (
    token_logprobs as token_logprobs,
    token_logprobs_and_entropy as token_logprobs_and_entropy,
)
from .model import Model as Model, decoder as decoder
from .nnx import NnxConfig as NnxConfig, from_nnx as from_nnx
from .output_layer import Head as Head, whole_logits as whole_logits
from .parameters import param_specs as param_specs
from .products import product as product
from .rope import (
    LinearScaling as LinearScaling,
    Llama3Scaling as Llama3Scaling,
    Rope as Rope,
    YarnScaling as YarnScaling,
)
from .scorer import sequence_scores as sequence_scores, token_values as token_values
from .spec import (
    Params as Params,
    ParamSpec as ParamSpec,
    Specs as Specs,
    abstract as abstract,
    flatten as flatten,
    init as init,
    parameter_count as parameter_count,
)
