"""transformers' conversion operations on extents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.io.checkpoint import TensorInfo
from hetero.io.errors import UnsupportedError
from hetero.sources import open_source
from hetero.sources.conversion import Extents, concatenate, resolve, stack
from hetero.sources.source import Piece
from tests.tiny_models import write_checkpoint


def extent(name: str, *shape: int, offset: int = 0) -> Extents:
    nbytes = 4 * torch.Size(shape).numel()
    return Extents.of(TensorInfo(name, Path("x"), offset, nbytes, "F32", shape))


def test_stack_and_concatenate_are_torchs() -> None:
    """Experts of unequal halves: [gate; up] of each, on numbers and on extents."""
    gates, ups = [torch.randn(2, 3) for _ in range(3)], [torch.randn(5, 3) for _ in range(3)]
    data = {f"{kind}{i}": t for kind, list_ in (("g", gates), ("u", ups)) for i, t in enumerate(list_)}
    merged = concatenate([stack([extent(f"{k}{i}", n, 3) for i in range(3)]) for k, n in (("g", 2), ("u", 5))], dim=1)
    out = bytearray(4 * 3 * 7 * 3)
    for piece in merged.pieces:
        values = data[piece.tensor.name].numpy().tobytes()
        out[piece.dst_offset : piece.dst_offset + piece.tensor.nbytes] = values
    expected = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
    assert merged.shape == expected.shape
    assert torch.equal(torch.frombuffer(out, dtype=torch.float32).reshape(expected.shape), expected)


def test_concatenate_does_not_cut() -> None:
    with pytest.raises(ValueError, match="cut"):
        concatenate([extent("a", 4, 3), extent("b", 4, 3)], dim=1)
    assert concatenate([extent("a", 1, 3), extent("b", 1, 3)], dim=-1).pieces[1] == Piece(
        extent("b", 1, 3).pieces[0].tensor, 12
    )


def test_any_other_operation_is_refused_by_name(tmp_path: Path) -> None:
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    source = open_source(write_checkpoint(tmp_path, "llama"))
    model = source.build_model()
    name = "LlamaForCausalLM"
    converter = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Interleave(dim=1)])
    register_checkpoint_conversion_mapping(name, [converter])
    try:
        with pytest.raises(UnsupportedError) as caught:
            resolve(model, source.index.tensors, tmp_path)
    finally:
        import transformers.conversion_mapping as mapping

        registered: Any = mapping._checkpoint_conversion_mapping_cache
        del registered[name]
        mapping.USER_REGISTERED_MAPPINGS.discard(name)
    for part in ("Interleave(dim=1)", "model.layers.0.mlp.up_proj.weight", "save_pretrained"):
        assert part in str(caught.value)
