"""Models that SGLang lacks, for every server that loads this plugin, whatever cache it uses."""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Make SGLang know OLMo-Hybrid: its config, its attention backend and its model class. Safe to repeat."""
    from sglang.srt.configs.linear_attn_model_registry import (
        LinearAttnModelSpec,
        get_linear_attn_spec_by_arch,
        register_linear_attn_model,
    )

    from sglang_tailreplay import compat
    from sglang_tailreplay.models.olmo_hybrid_config import ARCHITECTURE, OlmoHybridConfig

    if get_linear_attn_spec_by_arch(ARCHITECTURE) is not None:
        return
    compat.register_config(OlmoHybridConfig)
    register_linear_attn_model(
        LinearAttnModelSpec(
            config_class=OlmoHybridConfig,
            backend_class_name=f"{__name__}.wide_beta.WideBetaGDNBackend",
            arch_names=[ARCHITECTURE],
        )
    )
    _register_classes()


def _register_classes() -> None:
    """SGLang's registry imports every model that it has, seconds of work that few processes need.

    So it is told where ours is, and looks there when it is imported; unless that happened, or the variable is taken.
    """
    registry = "sglang.srt.models.registry"
    if registry not in sys.modules and os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", __name__) == __name__:
        return
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.register(__name__, overwrite=True, strict=True)
