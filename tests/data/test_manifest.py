"""The manifest: strict, readable across versions, and one clear message for whatever is wrong with it."""

import json

import pytest

from blockdraft.data import DataError, GenerationSettings, LocalEngine, Prompt, open_dataset, read_manifest, regenerate
from blockdraft.data.manifest import write_manifest
from blockdraft.targets import Sampling

from tiny import tiny_target

FIRST_VERSION = {
    "format": 1,
    "identity": {
        "target": "485704f60d57fa77", "template": "3dc9aaf14db01800", "prompts": "d7e31a66b0249c9a", "num_prompts": 20,
        "shard_size": 16, "engine": {"name": "local", "batch_size": 64, "dtype": "float32"}, "temperature": 1.0,
        "top_k": 0, "top_p": 1.0, "max_new_tokens": 48, "max_length": 256, "seed": 42,
    },
    "about": {
        "target": "pocket", "engine": {"name": "local", "batch_size": 64, "dtype": "float32"}, "blockdraft": "0.1.0",
        "torch": "2.13.0+cpu", "transformers": "5.22.2", "python": "3.11.7",
    },
    "num_shards": 2,
    "complete": False,
    "shards": {
        "shard-00000.parquet": {
            "sha256": "58fa60a367fc7cb6e4aa713c5a53e17ae1d120d89a41373cf0d543f98dd201cf", "rows": 16,
            "prompt_tokens": 620, "response_tokens": 757, "finish_reasons": {"length": 12, "stop": 4},
            "dropped": {"cut off before its last turn": 2},
        },
    },
}  # fmt: skip
"""As blockdraft 0.1.0 wrote it."""


def write(folder, values):
    (folder / "manifest.json").write_text(json.dumps(values))


def changed(path, value):
    """The manifest above, with the value at a path of keys replaced, or removed if it is None."""
    values = json.loads(json.dumps(FIRST_VERSION))
    *way, last = path.split("/")
    inner = values
    for key in way:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return values


def test_manifests_of_the_first_version_are_read_and_written_back_the_same(tmp_path):
    write(tmp_path, FIRST_VERSION)
    manifest = read_manifest(tmp_path)
    assert manifest.identity.sampling == Sampling()
    assert (manifest.complete, manifest.totals.rows, manifest.about.target) == (False, 16, "pocket")
    assert manifest.identity.engine.name == "local"
    write_manifest(tmp_path, manifest)
    assert json.loads((tmp_path / "manifest.json").read_text()) == FIRST_VERSION


def test_whole_turns_are_part_of_the_identity_where_they_hold(tmp_path):
    target = tiny_target()
    settings = GenerationSettings(max_new_tokens=4, max_length=30, whole_turns=True)
    regenerate([Prompt("p", ("w5",))], target, settings, tmp_path, engine=LocalEngine(target, 1))
    assert json.loads((tmp_path / "manifest.json").read_text())["identity"]["whole_turns"] is True
    assert read_manifest(tmp_path).identity.whole_turns


def test_whether_it_is_complete_follows_from_the_shards(tmp_path):
    write(tmp_path, changed("complete", True))
    assert not read_manifest(tmp_path).complete


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("identity", None, "identity: Field required"),
        ("identity", [], "identity: Input should be"),
        ("identity/temperature", "1.0", "identity.temperature: Input should be a valid number"),
        ("identity/temperature", True, "identity.temperature: Input should be a valid number"),
        ("identity/temperature", float("nan"), "NaN is not a number"),
        ("identity/temperature", -1, "identity.temperature: Input should be greater than or equal to 0"),
        ("identity/top_p", 0, "identity.top_p: Input should be greater than 0"),
        ("identity/top_k", 1.5, "identity.top_k: Input should be a valid integer"),
        ("identity/target", "pocket", "identity.target: String should match pattern"),
        ("identity/sampler", "x", "identity.sampler: Extra inputs are not permitted"),
        ("identity/engine", {}, "identity.engine.name: Field required"),
        ("about/target", None, "about.target: Field required"),
        ("num_shards", 3, "20 conversations in shards of 16 make 2 shards, not 3"),
        ("shards", [], "shards: Input should be a valid dictionary"),
        ("shards/shard-00000.parquet/rows", 15, "finish reasons of shard-00000.parquet are not those of 15 rows"),
        ("shards/shard-00000.parquet/rows", -16, "greater than or equal to 0"),
        ("shards/shard-00000.parquet/sha256", "", "sha256: String should match pattern"),
        ("shards/../../secret", {}, "should match pattern"),
        ("shards/shard-00002.parquet", FIRST_VERSION["shards"]["shard-00000.parquet"], "is not one of the 2 shards"),
    ],
)  # fmt: skip
def test_the_impossible_is_one_message_that_names_the_file(tmp_path, path, value, message):
    if "secret" in path:
        values = changed("shards", {"../../secret": FIRST_VERSION["shards"]["shard-00000.parquet"]})
    else:
        values = changed(path, value)
    write(tmp_path, values)
    for read in (read_manifest, open_dataset):
        with pytest.raises(DataError) as caught:
            read(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / 'manifest.json'} is damaged: ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b'{"format": 1,', b"\xff", b"[]", b"3", b'"x"', b"[" * 100_000, b"{}"])
def test_what_is_no_manifest_at_all(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json is damaged: .*put a good copy back"):
        read_manifest(tmp_path)


def test_other_folders_and_formats(tmp_path):
    with pytest.raises(DataError, match=r"is not a data folder: it has no manifest.json"):
        open_dataset(tmp_path)
    (tmp_path / "other.parquet").touch()
    with pytest.raises(DataError, match="holds Parquet files but no manifest"):
        regenerate([Prompt("p", ("w5",))], tiny_target(), GenerationSettings(max_length=60), tmp_path)
    write(tmp_path, {"format": 99})
    with pytest.raises(DataError, match="has format 99; this version of blockdraft reads format 1"):
        open_dataset(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(DataError, match=r"manifest.json cannot be read: Is a directory"):
        open_dataset(tmp_path)


def test_a_shard_with_another_number_of_rows_than_is_counted_is_refused(tmp_path):
    target = tiny_target()
    settings = GenerationSettings(max_new_tokens=4, max_length=30)
    regenerate([Prompt(f"p{i}", ("w5",)) for i in range(3)], target, settings, tmp_path)
    values = json.loads((tmp_path / "manifest.json").read_text())
    shard = values["shards"]["shard-00000.parquet"]
    shard["rows"], shard["finish_reasons"] = 2, {"length": 2}
    write(tmp_path, values)
    with pytest.raises(DataError, match=r"shard-00000.parquet is damaged: .* counts 2 rows in it, and it has 3"):
        open_dataset(tmp_path)
