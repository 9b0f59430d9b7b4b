"""Every mixture of experts of transformers, tiny: readers find in its files what is quantized and what is not."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers import FP8_POW2, NVFP4
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, recommended_layers, skip_fqns
from torchao_blockwise.checkpoint.layouts import FP8, FP8_UE8M0, UE8M0_MODEL_TYPE
from torchao_blockwise.cli import main

pytest.importorskip("safetensors.torch")

from exported_models import TINY_MIXTURES, tensors_in, tiny_mixture
from readers import check_folder

CONFIGS = (
    (FP8_POW2, (FP8.name, FP8_UE8M0.name)),
    (NVFP4, ("nvfp4_compressed_tensors", "nvfp4_modelopt")),
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_interpreter")]


# Experts under names that no reader quantizes, and weights whose rows NVFP4 does not hold at these sizes.
LEFT_OUT = dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared", "aria_text"), ("*.experts",))
LEFT_OUT |= {"jetmoe": ("*.input_linear", "*.output_linear")}
LEFT_OUT |= {"deepseek_v4": ("*.o_a_proj",), "jamba": ("*.dt_proj",), "nemotron_h": ("*.shared_experts.down_proj",)}


# test_plain_layers.py has the refusal of its experts.
@pytest.mark.parametrize("family", [family for family in TINY_MIXTURES if family != "inkling2_text"])
def test_files(family, tmp_path):
    """`export` of a model and `convert` of its plain files write the same tensors, and name the same layers."""
    tiny_mixture(family, "cpu").save_pretrained(tmp_path / "plain")
    skipped = LEFT_OUT.get(family, ())
    for config, formats in CONFIGS:
        model = tiny_mixture(family, "cpu")
        chosen = recommended_layers(model)
        quantize_(model, config, filter_fn=chosen & skip_fqns(*skipped) if skipped else chosen)
        for format in formats:
            if format == FP8_UE8M0.name and not family.startswith(UE8M0_MODEL_TYPE):
                continue
            command = ["convert", str(tmp_path / "plain"), str(tmp_path / f"converted_{format}"), "--to", format]
            if format == FP8.name:
                command.append("--power-of-2-scales")
            assert main([*command, *(x for pattern in skipped for x in ("--skip", pattern))]) == 0
            checkpoint.export(model, tmp_path / f"exported_{format}", format)
            found = {}
            for writer in ("exported", "converted"):
                folder = tmp_path / f"{writer}_{format}"
                assert min(check_folder(folder, format, packages=True).values()) > 0
                settings = json.loads((folder / "config.json").read_text())["quantization_config"]
                found[writer] = ({name: x.dtype for name, x in tensors_in(folder).items()}, settings)
            assert found["exported"] == found["converted"]
            shutil.rmtree(tmp_path / f"exported_{format}")
            shutil.rmtree(tmp_path / f"converted_{format}")
