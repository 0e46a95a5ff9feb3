"""What a decode node may take on."""

from dataclasses import dataclass

from pdserve.core.work import Work
from pdserve.decode_node.leg import num_blocks_at_most


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Bounds of scheduling; see `DecodeSettings`."""

    max_batch: int
    max_model_len: int
    block_size: int
    growth_blocks: int
    reserve_on_submit: bool = False
    overtake_s: float = 2.0

    def never_fits(self, work: Work, num_blocks: int) -> str:
        """Return why a leg cannot be served even alone in a pool of `num_blocks`; empty if it can."""
        if work.max_len > self.max_model_len:
            return f"{work.max_len} tokens exceed the model length of {self.max_model_len}"
        needed = num_blocks_at_most(work, self.block_size)
        if needed <= num_blocks:
            return ""
        what = f"{work.num_sequences} sequences of {work.max_len} tokens"
        return f"{what} take {needed} blocks of {self.block_size} tokens, the pool has {num_blocks}"
