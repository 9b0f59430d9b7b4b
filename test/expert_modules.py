"""Modules of experts that tests convert, and what their filters find."""

import torch
import torch.nn.functional as F
from helpers import weight
from torch import nn

from torchao_blockwise import MasterWeightTensor


class Experts(nn.Module):
    """Experts' weights, a bias an expert, one for all, and a router's matrix."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up = nn.Parameter(weight(4, 96, 64, seed=1).to(dtype) / 512)
        self.down = nn.Parameter(weight(4, 64, 96, seed=2).to(dtype) / 512)
        self.bias = nn.Parameter(torch.zeros(4, 64))
        self.row_bias = nn.Parameter(torch.zeros(4, 1, 64))
        self.absent = None

    def forward(self, x, ends):
        return F.grouped_mm(F.relu(F.grouped_mm(x, self.up.mT, offs=ends)), self.down.mT, offs=ends)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(64, 64)
        self.router = nn.Linear(64, 4)
        self.experts = Experts()

    def forward(self, x, ends):
        return self.experts(self.attention(x), ends) + self.router(x).sum()


class Model(nn.Module):
    def __init__(self, blocks: int = 2):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 8, 64))
        self.conv = nn.Conv1d(64, 64, 3)
        self.bilinear = nn.Bilinear(8, 8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(64, 16)

    def forward(self, x, ends):
        for layer in self.layers:
            x = layer(x, ends)
        return self.lm_head(x)


X, ENDS = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)), torch.tensor([4, 4, 7, 9]).int()
EXPERTS = [f"layers.{i}.experts" for i in range(2)]
LINEARS = [f"layers.{i}.{name}" for i in range(2) for name in ("attention", "router")] + ["lm_head"]


def accepted(filter_fn, model=None) -> list[str]:
    model = Model() if model is None else model
    return [fqn for fqn, m in model.named_modules() if filter_fn(m, fqn)]


def kinds(model) -> dict[str, type]:
    return {n: type(p) for n, p in model.named_parameters() if type(p) is not nn.Parameter}


def named(*names: str, kind=MasterWeightTensor, blocks: int = 2) -> dict[str, type]:
    return {f"layers.{i}.experts.{name}": kind for i in range(blocks) for name in names}


# Every mixture of experts that transformers 5.23 builds from its default configuration or from a few options, and
# the linear layers that choose experts or gate one. Routers that are not linear layers are never converted.
ROUTERS = {
    "afmoe": "mlp.router.gate",
    "gemma4_text": "per_layer_input_gate, router.proj",
    "hunyuan_v1_moe": "mlp.gate.wg",
    "jetmoe": "mlp.router.layer, self_attention.experts.router.layer",
    "llama4_text": "feed_forward.router",
    "longcat_flash": "mlp.router.classifier",
    "phimoe": "mlp.router",
    "qwen2_moe": "mlp.shared_expert_gate",
    "qwen3_5_moe_text": "mlp.shared_expert_gate",
    "qwen3_next": "mlp.shared_expert_gate",
    "zaya": "mlp.gate.down_proj, mlp.gate.router_mlp.fc1, mlp.gate.router_mlp.fc2, mlp.gate.router_mlp.out_proj",
    # Their experts are linear layers.
    "nllb-moe": "ffn.router.classifier",
    "switch_transformers": "layer.1.mlp.router.classifier, layer.2.mlp.router.classifier",
}
ROUTERS |= dict.fromkeys(
    """
    aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1
    dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm4v_moe_text glm5_next_text
    glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hy_v3 hy_v4 inkling2_text
    inkling_text jamba kimi_linear kolibri1 laguna mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
    mistral4 mistral_large4_text mixtral muse_spark_text nemotron_h olmoe openai_privacy_filter qwen3_moe
    qwen3_vl_moe_text solar_open
    """.split(),  # noqa: SIM905
    "",
)
