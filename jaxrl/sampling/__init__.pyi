from .base import (
    ClosedError as ClosedError,
    Completion as Completion,
    OwnTurn as OwnTurn,
    Sampler as Sampler,
    SamplingParams as SamplingParams,
    Turn as Turn,
    TurnCache as TurnCache,
    check_recorded as check_recorded,
)
from .embedded.one_at_a_time import OneAtATime as OneAtATime
from .embedded.own_batch import OwnBatch as OwnBatch
from .embedded.program import DecodeProgram as DecodeProgram, decode_program as decode_program
from .embedded.sampler import EmbeddedSampler as EmbeddedSampler
from .multihost import MultihostSampler as MultihostSampler, NullSampler as NullSampler
from .stop_texts import StopTexts as StopTexts
from .vllm.in_process import VllmTpuSampler as VllmTpuSampler
from .vllm.logprobs import VllmScorer as VllmScorer
from .vllm.own_turns import VllmOwnSampler as VllmOwnSampler
from .vllm.router import (
    SamplerError as SamplerError,
    UnpublishedWeightsError as UnpublishedWeightsError,
)
from .vllm.sampler import VllmSampler as VllmSampler
from .vllm.stock import StockSampler as StockSampler
from .vllm.tpu_engine import TpuEngine as TpuEngine, prepare_tpu_engine as prepare_tpu_engine
