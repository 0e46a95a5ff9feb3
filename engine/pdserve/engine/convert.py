"""Convert a GGUF file into a Hugging Face folder in fp32: `python -m pdserve.engine.convert MODEL.gguf FOLDER`.

Dequantizing to fp32 is exact. Progress goes to stdout, one `progress 0.25` per line; an error ends with a traceback.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from pdserve.engine.quiet import quieten_transformers


def convert(gguf: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer (with chat template) and one fp32 safetensors file into `folder`."""
    _report(0.0)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _report(0.2)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        low_cpu_mem_usage=True,
    )
    _report(0.8)
    # The weights are plain now; left in place, such traces make saving and every later loader treat them as GGUF.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder, max_shard_size="100GB")
    tokenizer.save_pretrained(folder)
    # transformers records where it read from, which is a temporary folder of this machine.
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        for entry in ("_name_or_path", "_model_name_or_path", "name_or_path"):
            content.pop(entry, None)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    _report(1.0)


def _report(share: float) -> None:
    sys.__stdout__.write(f"progress {share}\n")  # type: ignore[union-attr]  # None only without a console
    sys.__stdout__.flush()  # type: ignore[union-attr]  # as above


def main() -> None:
    """Convert as the command line says, keeping the library's own bars and advice off the streams."""
    quieten_transformers()
    chatter = io.StringIO()
    with contextlib.redirect_stdout(chatter):
        convert(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
