"""What a decode node's pool holds when several sequences continue one context: they share its full blocks, and nothing else."""

from dataclasses import dataclass

from pdserve.core.layout import num_blocks_for


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool of one node."""

    num_blocks: int
    block_size: int

    def needs(self, num_context: int, max_len: int, num_sequences: int) -> int:
        """Return the blocks that the sequences take if each gets `max_len` tokens long, the context of `num_context` included."""
        num_shared = num_context // self.block_size
        return num_shared + num_sequences * (num_blocks_for(max_len, self.block_size) - num_shared)

    def most_tokens(self, num_context: int, num_sequences: int) -> int:
        """Return how long each sequence can get, the context included; less than the context if not even that fits."""
        num_shared = num_context // self.block_size
        num_own = (self.num_blocks - num_shared) // num_sequences
        return (num_shared + num_own) * self.block_size
