"""Models unlike the embedded one: dense, without a tokenizer, without a decoder. Tiny, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

import pyhotexperts as phx

N_EMBD, N_HEAD, N_FF, N_VOCAB, N_LAYER = 64, 4, 96, 50, 2


def write_dense(
    path: Path, add: Callable[[gguf.GGUFWriter], object] = lambda writer: None, tensors_per_file: int = 0
) -> Path:
    """A model of llama's architecture without experts and without a tokenizer; `add` adds to its metadata."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * 0.1

    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_per_file)
    writer.add_block_count(N_LAYER)
    writer.add_context_length(256)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(N_VOCAB)
    add(writer)
    writer.add_tensor("token_embd.weight", random(N_VOCAB, N_EMBD))
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    writer.add_tensor("output.weight", random(N_VOCAB, N_EMBD))
    for i in range(N_LAYER):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(N_EMBD, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"blk.{i}.{name}.weight", random(N_EMBD, N_EMBD))
        for name in ("ffn_gate", "ffn_up"):
            writer.add_tensor(f"blk.{i}.{name}.weight", random(N_FF, N_EMBD))
        writer.add_tensor(f"blk.{i}.ffn_down.weight", random(N_EMBD, N_FF))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[phx.Model]:
    path = write_dense(tmp_path_factory.mktemp("dense") / "dense.gguf")
    with phx.Model(path, n_threads=1) as model:
        yield model


def test_a_dense_model_loads_and_generates(dense: phx.Model) -> None:
    assert (dense.info.architecture, dense.info.n_expert, dense.info.n_vocab) == ("llama", 0, N_VOCAB)
    result = dense.generate([1, 2, 3], temperature=0, max_tokens=10)
    assert len(result.tokens) == 10
    dense.reset()
    dense.eval([1, 2, 3])
    assert dense.logits.shape == (N_VOCAB,)
    assert int(dense.logits.argmax()) == result.tokens[0]
    assert dense.score([1, 2, 3, 4]).nll.shape == (3,)


def test_a_model_without_tokenizer_takes_tokens_alone(dense: phx.Model) -> None:
    assert not dense.info.has_vocab
    with dense.stream([5], temperature=0, max_tokens=4) as stream:
        chunks = list(stream)
    assert [c.text for c in chunks] == [""] * 4
    assert tuple(t for c in chunks for t in c.tokens) == stream.result.tokens
    assert stream.result.text == ""
    for call in (lambda: dense.generate("text"), lambda: dense.tokenize("a"), lambda: dense.detokenize([1])):
        with pytest.raises(phx.UnavailableError, match="no tokenizer"):
            call()
    assert dense.generate([1], temperature=0, max_tokens=1).tokens


def test_a_dense_model_has_no_routing(dense: phx.Model) -> None:
    with pytest.raises(phx.UnavailableError, match="no routed experts"):
        dense.record_routing([1, 2])


def test_a_dense_model_takes_the_offload_modes_of_this_machine(dense: phx.Model) -> None:
    with phx.Model(dense.path, offload=phx.cpu_experts(), n_threads=1) as same:
        assert same.generate([1, 2, 3], temperature=0, max_tokens=5).tokens == (
            dense.generate([1, 2, 3], temperature=0, max_tokens=5).tokens
        )


def test_modes_that_need_a_gpu_say_so_without_one() -> None:
    if any(d.is_gpu for d in phx.devices()):
        pytest.skip("this process can use a GPU")
    for mode in (phx.full_gpu(), phx.layers(2)):
        with pytest.raises(phx.UnavailableError, match=r"needs a GPU.*-cmoe"):
            phx.Model(offload=mode)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    data = write_dense(tmp_path / "whole.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data.replace(b"blk.1.ffn_down.weight", b"blk.9.ffn_down.weight"))
    with pytest.raises(phx.ModelLoadError, match=r"blk\.1\.ffn_down"):
        phx.Model(damaged)


def rewrite(source: Path, target: Path, **values: object) -> Path:
    """A copy of a GGUF with tensors or numbers of other kinds."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        value = values.get(field.name.replace(".", "_"), field.contents())
        writer.add_key_value(field.name, value, kind)
    for tensor in reader.tensors:
        data = tensor.data
        change = values.get(tensor.name.replace(".", "_"))
        writer.add_tensor(tensor.name, data if change is None else data.astype(change))  # type: ignore[call-overload]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"blk_0_attn_norm_weight": np.float16}, "attn_norm"),
        ({"blk_1_attn_q_weight": np.int32}, "attn_q"),
        ({"output_weight": np.float64}, "output.weight"),
        ({"llama_attention_layer_norm_rms_epsilon": -1.0}, "epsilon"),
        ({"llama_attention_layer_norm_rms_epsilon": float("nan")}, "epsilon"),
    ],
)
def test_what_upstream_would_crash_on_is_refused(tmp_path: Path, change: dict[str, object], word: str) -> None:
    whole = write_dense(tmp_path / "whole.gguf")
    with phx.Model(rewrite(whole, tmp_path / "same.gguf"), n_threads=1) as model:
        assert model.generate([1], max_tokens=2, temperature=0).tokens
    with pytest.raises(phx.ModelLoadError, match=word):
        phx.Model(rewrite(whole, tmp_path / "changed.gguf", **change))


def test_numbers_that_are_none_are_an_error(tmp_path: Path) -> None:
    whole = write_dense(tmp_path / "whole.gguf")
    data = bytearray(whole.read_bytes())
    ones = data.rfind(np.ones(N_EMBD, np.float32).tobytes())
    data[ones : ones + 4 * N_EMBD] = np.full(N_EMBD, np.nan, np.float32).tobytes()
    damaged = tmp_path / "nan.gguf"
    damaged.write_bytes(data)
    with phx.Model(damaged, n_threads=1) as model:
        for call in (lambda: model.generate([1, 2], max_tokens=3), lambda: model.score([1, 2, 3])):
            with pytest.raises(phx.DecodeError, match="not finite"):
                call()
