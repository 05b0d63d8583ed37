"""The tables of a config about sampling: parameters, the sampler, its servers, rollouts."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from jaxrl.bridge import check_arguments, check_url
from jaxrl.config.section import Seconds, Section, Texts, is_http_address

Order = Literal["begun", "finished"]


class SamplingConfig(Section):
    """Sampling parameters of completions, and their ends."""

    max_tokens: PositiveInt = 512
    """Maximum completion length, in tokens."""

    temperature: PositiveFloat = 1.0
    """Divides the logits of the sampler and of the learner's log-probs. Evaluation is greedy."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""

    top_k: NonNegativeInt = 0
    """Keep this many most probable tokens; 0 keeps all. Training with `top_k`, `top_p` or `min_p`
    keeps at most as many as a record of 32 bytes names, 14 of a vocabulary of 152,000."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less probable than this times the largest probability; 0 drops none."""

    stop: Texts = ()
    """Texts that end a completion, besides the model's end-of-sequence tokens. They are looked for
    in its decoded text, special tokens included. The token that completes one is kept."""

    max_batch: PositiveInt = 64
    """Completions that a sampler in this program decodes at once; more is faster and takes more
    memory. Others wait until some have ended."""

    @property
    def truncated(self) -> bool:
        """True if top_p, top_k or min_p drops tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def conflicts(self, sampler: "SamplerConfig", *, replay: bool) -> Iterator[str]:
        """Describes each key that the run's sampler cannot follow, or not with `probe.replay`."""
        if self.temperature < 0.01 and sampler.name != "embedded":
            yield (
                f"sampling.temperature = {self.temperature:g} and sampler.name = {sampler.name!r}: "
                "vLLM samples at .01 instead of a lower temperature, and its log-probs would be of "
                "another distribution than the learner's; raise it to 0.01 or more"
            )
        if not self.truncated:
            return
        key = "sampling.top_p, top_k or min_p"
        records = f"{key} needs a sampler that reports the tokens it keeps, which"
        if sampler.name == "vllm_tpu":
            yield f"{records} sampler.name = 'vllm_tpu' does not; leave it out"
        if sampler.name == "vllm" and not sampler.url and sampler.device == "cpu":
            yield (
                f"{records} vLLM's CPU build cannot (its newer model runner needs Triton); set "
                "sampler.device = 'cuda' or sampler.name = 'embedded', or leave it out"
            )
        if replay:
            yield (
                f"probe.replay and {key}: vLLM scores given tokens only over the whole vocabulary; "
                "leave one of the two out"
            )


class ServerConfig(Section):
    """A vLLM server on this machine."""

    python: str = ".venv-vllm/bin/python"
    """Python interpreter of an environment with vLLM and jaxrl (scripts/install_vllm.sh makes one
    for the CPU)."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of that environment's vLLM build."""

    kv_cache_bytes: PositiveInt | None = None
    """Size of the KV cache. If absent, vLLM decides on a GPU; on a CPU the cache holds the
    completions that are requested at once, with at least 256 MiB and at most a quarter of the free
    memory, or more if one completion needs it. That of `vllm_tpu` then holds `sampling.max_batch`
    completions of full length."""

    vllm_args: Texts = ()
    """Further arguments of vLLM's api_server, except those jaxrl sets or checks, such as --host."""

    @field_validator("vllm_args")
    @classmethod
    def _check_arguments(cls, value: Texts) -> Texts:
        check_arguments(value)
        return value


class SamplerConfig(ServerConfig):
    """The sampler: JAX itself, vLLM in this program, or vLLM servers; weights are published to both
    kinds of vLLM."""

    name: Literal["embedded", "vllm", "vllm_tpu"] = "embedded"
    """`embedded` decodes with JAX in this program; `vllm` sends requests to servers; `vllm_tpu`
    runs vLLM's engine for TPUs in this program (scripts/install_vllm_tpu.sh)."""

    devices: NonNegativeInt = 0
    """Devices for the sampler of this program alone, besides those of [mesh]; with
    `rollouts.max_staleness` both then work at the same time. 0 shares the learner's."""

    tensor: PositiveInt | None = None
    """Shards of every matrix product of the embedded sampler, on a mesh of its own over its
    devices; they decode different rows otherwise. If absent, 1 with sampler.devices. On the
    learner's devices its mesh stays, unless that would gather weights for every token: then as many
    of its shards of a row as the model's heads and columns divide over. For `vllm_tpu` this is the
    number of devices that it uses, and divides the heads of keys and values; if absent, as many as
    it can use."""

    expert: PositiveInt | None = None
    """Shards of the embedded sampler's experts, on the same mesh; if absent, chosen as `tensor`."""

    url: Texts = ()
    """Addresses of running servers (`jaxrl serve`), such as http://127.0.0.1:8000. If empty, the
    run starts a server and stops it at the end."""

    store: str | None = None
    """Object store, web server or shared directory that carries weights to servers on other hosts:
    s3://BUCKET/PATH, gs://..., az://..., https://HOST/PATH or file:///DIRECTORY. Needs
    jaxrl[store]. If absent, weights go through this host's shared memory, or to servers that a
    fleet has on other nodes through RUN_DIR/store."""

    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight to servers during a weight sync: `keep` continues them with the new
    weights, `wait` lets them finish first, `abort` ends them and continues with new requests.
    `vllm_tpu` always waits."""

    sleep: bool = False
    """A server on the learner's own GPU drops its weights and its KV cache while the learner
    trains (vLLM's sleep, level 2), and takes them back for the publish. Needs a server with
    --enable-sleep-mode, as the run starts it."""

    max_requests: PositiveInt = 32
    """Maximum number of concurrent requests per server; the group of one prompt is one request."""

    timeout: Seconds = 600.0
    """Time limit in seconds of a request, and of each part of a publish."""

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: str | None) -> str | None:
        if value is not None:
            check_url(value)
        return value

    def publishes_to(self, address: str) -> bool:
        """Tells if an address is one of `url`, whose servers get the learner's weights."""
        return address.rstrip("/") in {url.rstrip("/") for url in self.url}

    def _contradictions(self) -> Iterator[str]:
        for url in self.url:
            if not is_http_address(url):
                yield f"sampler.url = {url!r}: expected an address, such as http://HOST:8000"
        if self.name != "vllm" and self.url:
            yield (
                f"sampler.url = {list(self.url)} and sampler.name = {self.name!r}, which uses no "
                "server; set sampler.name = 'vllm'"
            )
        if self.name == "vllm_tpu" and self.vllm_args:
            yield (
                f"sampler.vllm_args = {list(self.vllm_args)}: arguments of a server, and "
                "sampler.name = 'vllm_tpu' starts none; leave it out"
            )
        if self.sleep and (self.name != "vllm" or len(self.url) > 1 or self.store is not None):
            yield (
                "sampler.sleep is for one server on the learner's own GPU, with sampler.name = "
                "'vllm', at most one sampler.url and no sampler.store; leave it out"
            )
        here = {
            f"sampler.devices = {self.devices}": self.devices,
            f"sampler.tensor = {self.tensor}": self.tensor,
        }
        for key, given in here.items():
            if given and self.name == "vllm":
                yield f"{key} applies to a sampler in this program; leave it out"
        if self.expert and self.name != "embedded":
            yield (
                f"sampler.expert = {self.expert} applies to sampler.name = 'embedded' only; leave "
                "it out"
            )


class RolloutsConfig(Section):
    """Asynchronous training: sampling while the learner trains."""

    max_staleness: NonNegativeInt = 0
    """Maximum number of policy versions that the sampler may be behind the learner. With 0 they
    take turns, and the run is a function of the seed; above 0 they work at the same time, and the
    batches depend on timing."""

    order: Order = "begun"
    """Order in which groups are trained on. `begun`: as sampling began; the learner waits for long
    completions, and no group becomes too stale. `finished`: as sampling finished; the learner does
    not wait, stale groups are dropped and counted, and short completions are favoured."""

    replay_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each batch's groups that were trained on in the step before (partial refresh); the
    others are new. Each group is trained on twice at most. The loss must weight stale tokens."""

    def _contradictions(self) -> Iterator[str]:
        if self.replay_share and self.max_staleness:
            yield (
                f"rollouts.replay_share = {self.replay_share:g} and rollouts.max_staleness = "
                f"{self.max_staleness}: a run that samples ahead trains on every group once; set "
                "one of them to 0"
            )
