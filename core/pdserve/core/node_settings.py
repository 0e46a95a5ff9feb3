"""What a prefill or a decode node is told."""

from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pdserve.core.errors import ConfigError
from pdserve.core.link_faults import parse_link_faults
from pdserve.core.link_shape import parse_link_shape
from pdserve.core.process_settings import WILDCARD_HOSTS, Positive, ProcessSettings, Seconds


class NodeSettings(ProcessSettings):
    """What a prefill or decode node is told."""

    threads: Positive = Field(1, description="Engine threads; set before torch is imported.")
    block_size: int = Field(16, ge=1, le=1024, description="Token positions per KV block.")
    kv_blocks: Positive = Field(1024, description="Blocks of the KV pool, allocated once at start.")
    max_model_len: Positive | None = Field(
        None, description="Longest prompt plus answer; unset: the model's own length."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto (float32 on CPU), float32, bfloat16 or float16."
    )
    device: str = Field("auto", description="auto, cpu or cuda[:N].")
    attention_backend: Literal["auto", "native", "torch-sdpa", "triton"] = Field(
        "auto",
        description="auto (native on a CPU where it was built, triton on CUDA where it is installed), native, torch-sdpa, "
        "or triton (CUDA only).",
    )
    max_waiting: Positive = Field(256, description="Submits that may wait; more are answered BUSY.")
    kv_window_bytes: Positive = Field(64 << 20, description="KV bytes that may be under way from one peer.")
    kv_receive_bytes: Positive = Field(
        256 << 20, description="KV bytes that may be under way from all peers together, beyond two frames of each."
    )
    kv_staging_bytes: Positive = Field(16 << 20, description="KV bytes that may be packed and not yet sent.")
    kv_engine: Literal["zeromq", "nixl"] = Field(
        "zeromq",
        description="zeromq or nixl: what carries KV. nixl is for RDMA fabrics, needs pdserve[nixl]; the same on every node.",
    )
    kv_encryption: Literal["none", "curve"] = Field(
        "none",
        description="none or curve: KV encrypted with keys made from the cluster secret; the same on every node.",
    )
    kv_shared_memory: Literal["auto", "off"] = Field(
        "auto", description="auto or off: KV to and from nodes of this host and user goes through shared memory."
    )
    kv_wire: Literal["plain", "int8", "fp8"] = Field(
        "plain",
        description="plain, int8 or fp8: a prefill node sends KV in 8 bits, a decode node takes them. Not exact.",
    )
    kv_link: str | None = Field(
        None, description="For experiments: what this node sends of KV goes as over BANDWIDTH,LATENCY[,JITTER]."
    )
    kv_faults: str | None = Field(
        None, description="For experiments, never for service: faults of the KV link, e.g. drop=0.01,corrupt@12,seed=7."
    )
    grant_wait_s: Seconds = Field(30.0, description="Longest wait for blocks on the decode node.")
    transfer_idle_s: Seconds = Field(10.0, description="Silence after which a running transfer is given up.")
    step_limit_s: Seconds = Field(60.0, description="Age of a running step at which the engine counts as stuck.")

    @model_validator(mode="after")
    def _encryption_has_a_secret(self) -> Self:
        if self.kv_encryption != "none" and self.secret is None:
            raise ValueError("kv_encryption: needs cluster_secret, or its file, which its keys are made from")
        if self.kv_encryption != "none" and self.kv_engine == "nixl":
            raise ValueError(
                "kv_encryption: what NIXL carries is not encrypted; set kv_engine to zeromq, or this to none"
            )
        return self

    @field_validator("kv_link", "kv_faults")
    @classmethod
    def _experiments_are_known(cls, text: str | None, info: ValidationInfo) -> str | None:
        try:
            (parse_link_shape if info.field_name == "kv_link" else parse_link_faults)(text)
        except ConfigError as error:
            raise ValueError("\n".join(fault.removeprefix(f"{info.field_name}: ") for fault in error.faults)) from None
        return text


class PrefillSettings(NodeSettings):
    """What a prefill node is told."""

    table: ClassVar[str] = "prefill"

    token_budget: Positive = Field(128, description="Prompt tokens per step, over all prompts of the step.")
    max_prompts_per_step: Positive = Field(16, description="Prompts that may share a step.")
    open_ahead: Positive = Field(8, description="Waiting prompts that ask their decode node for blocks early.")


class DecodeSettings(NodeSettings):
    """What a decode node is told."""

    table: ClassVar[str] = "decode"

    kv_port: int = Field(0, ge=0, le=65_535, description="Port for KV; 0 takes a free one.")
    kv_advertise: str | None = Field(None, description="Host that prefill nodes reach for KV; unset: as advertise.")
    max_batch: Positive = Field(64, description="Sequences per step.")
    reserve: Literal["on_submit", "on_open"] = Field(
        "on_open", description="When blocks are promised: on_submit or on_open."
    )
    growth_blocks: int = Field(1, ge=0, description="Blocks kept free per running sequence when another is let in.")

    @field_validator("kv_advertise")
    @classmethod
    def _kv_is_reachable(cls, kv_advertise: str | None) -> str | None:
        if kv_advertise is not None and kv_advertise in WILDCARD_HOSTS:
            raise ValueError(f"{kv_advertise!r} is no address that others can reach")
        return kv_advertise
