"""What choosing a token asks of each row of logits, in two passes over them; torch takes about six."""

import torch
from torch import Tensor

from pdserve.kernels.native.alone import run_alone
from pdserve.kernels.native.structures import OperationKind, OperationStruct, StepStruct

WORDS = 3
"""Of 4 bytes in `struct summary` of rows.h."""


def summarize(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of `logits` [rows, vocabulary], float32, what `sampling.Summarize` says."""
    rows, vocab_size = logits.shape
    logits = logits.contiguous()
    summaries = torch.empty(rows, WORDS)
    operation = OperationStruct(
        kind=OperationKind.SUMMARIZE,
        width=vocab_size,
        x=logits.data_ptr(),
        y=summaries.data_ptr(),
        x_stride=logits.stride(0),
        y_stride=WORDS,
    )
    run_alone(operation, StepStruct(num_rows=rows))
    return summaries[:, 0], summaries[:, 1], summaries.view(torch.int32)[:, 2].long()
