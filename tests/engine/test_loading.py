"""A folder on disk becomes an engine with an identity, or a named error that says what is wrong with the folder."""

import json
import os
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ModelUnavailable
from pdserve.core.models import MANIFEST_NAME
from pdserve.engine.engine import Engine
from pdserve.engine.weights import weight_digest
from pdserve.kernels.backends import choose_backend
from tests.engine.small import model_of, prompt_logits, prompt_of, small_engine


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    model_of("qwen3").module.save_pretrained(folder)  # type: ignore[operator]  # a PreTrainedModel
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "tiny")


def load(folder: Path, dtype: str = "float32") -> Engine:
    return Engine.load(folder, dtype=dtype, block_size=4, num_blocks=40)


def test_a_folder_gives_the_model_that_was_saved(folder: Path) -> None:
    engine = load(folder)
    expected = prompt_logits(small_engine(), prompt_of(12), 5)
    torch.testing.assert_close(prompt_logits(engine, prompt_of(12), 5), expected, atol=2e-5, rtol=0)
    assert (engine.dtype, engine.device, engine.attention_backend) == ("float32", "cpu", choose_backend("cpu").name)
    assert engine.layout == small_engine().layout


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_dtypes_load_and_come_close(folder: Path, dtype: str) -> None:
    engine = load(folder, dtype)
    exact = prompt_logits(small_engine(), prompt_of(12), 12)
    assert engine.layout.dtype == engine.capabilities.kv_dtype == dtype
    assert float((prompt_logits(engine, prompt_of(12), 12).float() - exact).abs().max()) < 0.2 * float(
        exact.abs().max()
    )


def test_identity_is_stable_and_named(folder: Path) -> None:
    fields = load(folder).identity.as_fields()
    assert fields == load(folder).identity.as_fields()
    assert fields["tokenizer_digest"] == sha256(b"{}").hexdigest()
    assert fields["kv.layout"] == "; ".join(["1 of 2x16/16 window 6", "1 of 2x16/16 window none"] * 2)
    assert {
        "kv.rope_parameters",
        "kv.sliding_window",
        "kv.layer_types",
        "kv.rms_norm_eps",
        "kv.head_dim",
    } <= fields.keys()
    assert not {"kv.transformers_version", "kv.dtype", "kv.attention_dropout"} & fields.keys()


def _changed(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    return change


def _one_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def _tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{ }")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_one_weight, "weight_digest"),
        (_tokenizer, "tokenizer_digest"),
        (_changed("rms_norm_eps", 1e-4), "kv.rms_norm_eps"),
        (_changed("rope_parameters", {"rope_theta": 9999.0, "rope_type": "default"}), "kv.rope_parameters"),
        (_changed("hidden_act", "gelu"), "kv.hidden_act"),
    ],
)
def test_each_difference_has_a_name(folder: Path, change: Callable[[Path], None], field: str) -> None:
    before = load(folder).identity
    change(folder)
    assert load(folder).identity.differences(before) == [field]


def test_a_window_that_differs_shows_in_the_measured_layout(folder: Path) -> None:
    before = load(folder).identity
    _changed("sliding_window", 5)(folder)
    assert load(folder).identity.differences(before) == ["kv.layout", "kv.sliding_window"]


def test_digests_are_remembered_until_the_file_changes(folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "cache" / "digests"
    first = weight_digest(folder)
    (note,) = notes.iterdir()
    # A remembered digest is used: proven by a note that lies.
    told = json.loads(note.read_text())
    note.write_text(json.dumps(told | {"sha256": "0" * 64}))
    assert weight_digest(folder) != first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert weight_digest(folder) == first
    for note in notes.iterdir():
        note.write_text("not json")
    assert weight_digest(folder) == first


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, 2, {7, 8}),
        ({"eos_token_id": 5}, 2, {5}),
        ({}, 2, {2}),
        (None, [3, 4], {3, 4}),
        (None, None, set()),
    ],
)
def test_eos_ids_are_those_of_the_generation_config_first(
    folder: Path, generation: dict[str, object] | None, config: object, expected: set[int]
) -> None:
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    _changed("eos_token_id", config)(folder)
    assert load(folder).eos_token_ids == expected


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _without_a_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def _damaged_manifest(folder: Path) -> None:
    digest = sha256((folder / "config.json").read_bytes()).hexdigest()
    manifest = {"model": "some-alias", "files": {"config.json": digest, "model.safetensors": "0" * 64}}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read the config"),
        (lambda folder: (folder / "config.json").unlink(), "cannot read the config"),
        (_changed("num_hidden_layers", "many"), "cannot read the config"),
        (_changed("model_type", "no_such_model"), "cannot read the config"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no \.safetensors"),
        (_truncated, "cannot read the weights"),
        (_without_a_weight, r"lacks 1 weights of qwen3 .*layers\.2\.mlp\.up_proj"),
        (_changed("vocab_size", 300), "cannot read the weights|lacks"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), r"generation_config\.json"),
        (_damaged_manifest, r"model\.safetensors is damaged .*pdserve pull --force some-alias"),
        (lambda folder: (folder / MANIFEST_NAME).write_text("{}"), "pdserve pull --force"),
    ],
)
def test_damaged_folders_are_named(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelUnavailable) as caught:
        load(folder)
    assert re.search(message, str(caught.value)), str(caught.value)
