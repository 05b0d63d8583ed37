from .adapters import (
    AdapterPublisher as AdapterPublisher,
    Delivery as Delivery,
    PublishBase as PublishBase,
    in_place as in_place,
)
from .base import (
    BehindError as BehindError,
    LearnerIdentity as LearnerIdentity,
    PoisonedError as PoisonedError,
    RefusedError as RefusedError,
    TensorSpec as TensorSpec,
    Timings as Timings,
    UnavailableError as UnavailableError,
    WeightSource as WeightSource,
    new_learner as new_learner,
)
from .in_vllm.auth import headers as headers
from .in_vllm.ownership import TAKE_OVER as TAKE_OVER
from .owned_directory import MEMORY as MEMORY, OwnedDirectory as OwnedDirectory
from .servers.api_key import (
    given_key as given_key,
    known_key as known_key,
    server_key as server_key,
)
from .servers.arguments import check_arguments as check_arguments
from .servers.control import VllmServer as VllmServer
from .servers.kv_cache_size import (
    free_memory as free_memory,
    kv_cache_size as kv_cache_size,
    token_bytes as token_bytes,
)
from .servers.launch import (
    INSTALL as INSTALL,
    LocalServer as LocalServer,
    ServerFailedError as ServerFailedError,
    ServerOptions as ServerOptions,
    free_port as free_port,
    is_loopback as is_loopback,
)
from .servers.routes import ControlError as ControlError, ServerRoutes as ServerRoutes
from .servers.stock import StockServer as StockServer
from .shared_memory import SharedMemoryPublisher as SharedMemoryPublisher
from .source import ParamsSource as ParamsSource
from .store.bucket import Bucket as Bucket, Known as Known, ReplacedError as ReplacedError
from .store.objects import (
    MissingObjectError as MissingObjectError,
    Store as Store,
    StoreError as StoreError,
    available as available,
    check_url as check_url,
    directory_of as directory_of,
)
from .store.process import AgentProcess as AgentProcess
from .store.publisher import (
    StoreFollower as StoreFollower,
    StorePublisher as StorePublisher,
    bring as bring,
)
from .store.upload import Upload as Upload
from .swap import WeightPublisher as WeightPublisher
from .tpu_engine.publisher import EnginePublisher as EnginePublisher, LiveEngine as LiveEngine
from .tpu_engine.rules import engine_refusal as engine_refusal
