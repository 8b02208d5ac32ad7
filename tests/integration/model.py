"""SGLang's own model runner on a tiny checkpoint, without a server: for functions that run in the sandbox."""

from __future__ import annotations

from array import array
from typing import Any

import torch

from sglang_tailreplay import plugin

REQUESTS = 4  # and one state slot for each


class Model:
    """One request at a time. Every token's logits, not only the last one's, float32 on the CPU."""

    def __init__(self, path: str, **settings: Any):
        plugin.register()
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

        arguments = ServerArgs(
            model_path=path, device="cpu", dtype="float32", attention_backend="torch_native",
            cuda_graph_backend_decode="disabled", cuda_graph_backend_prefill="disabled", disable_radix_cache=True,
            max_total_tokens=4096, max_running_requests=REQUESTS, max_mamba_cache_size=REQUESTS,
            mem_fraction_static=0.2, **settings,
        )  # fmt: skip
        set_global_server_args_for_scheduler(arguments)
        self._one_batch = one_batch
        loaded, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), gpu_id=0, tp_rank=0)
        self.runner = loaded.torch_runner
        self.model = self.runner.model
        self._hidden: list[torch.Tensor] = []
        self.model.logits_processor.register_forward_pre_hook(lambda module, args: self._hidden.append(args[1].clone()))

    def request(self, ids: list[int]) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
        params.normalize(None)
        req = Req("test", "", array("q", ids), params, vocab_size=self.runner.model_config.vocab_size)
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.logprob_start_len = -1
        return req

    def prefill(self, req: Any, start: int, end: int) -> Any:
        """Tokens [start, end) of a request whose tokens before start were prefilled. Returns SGLang's batch."""
        if start:
            table = self.runner.req_to_token_pool.req_to_token
            req.prefix_indices = table[req.req_pool_idx, :start].to(torch.int64)
        req.set_extend_range(start, end)
        self._next, _, batch = self._one_batch.extend([req], self.runner)
        return batch

    def decode(self, batch: Any, steps: int) -> list[int]:
        """Greedy tokens, the first of which the prefill has chosen already."""
        tokens = [int(self._next)]
        for _ in range(steps):
            self._next, _ = self._one_batch.decode(self._next, batch, self.runner)
            tokens.append(int(self._next))
        return tokens

    def logits(self) -> torch.Tensor:
        """[T, vocab] of all tokens that ran since the last call."""
        hidden, self._hidden[:] = torch.cat(self._hidden), []
        return torch.nn.functional.linear(hidden, self.model.lm_head.weight)[:, : self.runner.model_config.vocab_size]

    def clear(self) -> None:
        """Forget all requests."""
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        self._hidden.clear()

    def states(self, req: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """conv [layers, C, W-1] and recurrent [layers, HV, V, K] of a request, of all GDN layers."""
        cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        slot = int(req.mamba_pool_idx)
        return cache.conv[0][:, slot].clone(), cache.temporal[:, slot].clone()


def reference(path: str) -> torch.nn.Module:
    """The same checkpoint in transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # Once SGLang has patched transformers, buffers that no checkpoint holds are left uninitialised.
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is not None:
        model.model.rotary_emb = type(rotary)(model.config)
    return model


def random_ids(tokens: int, seed: int = 1, vocabulary: int = 1000) -> list[int]:
    return torch.randint(2, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
