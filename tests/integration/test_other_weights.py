"""Hits that wait for the online guard, while SGLang's own weight updater changes the weights or gives memory back.

Functions without `test_` run in a sandbox: what they patch stays there.
"""

from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_tailreplay import hooks, runtime
from sglang_tailreplay.step import Sample
from sglang_tailreplay.verification import IDLE_SECONDS, Verifier


def events(call: str, fields: dict) -> list:
    """What happens in order when a hit waits, `call` reaches SGLang's updater, and the server then stays idle."""
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    log = []
    state = runtime.activate(None)
    hooks.install(hooks.SERVING)
    now = [0.0]
    state._verifier = Verifier(
        1.0, lambda tokens: log.append("cold prefill") or torch.zeros(4), lambda n: True, clock=lambda: now[0]
    )
    state.gate_capture = SimpleNamespace(flush=lambda: log.append("gates sent on"))
    state.decays = SimpleNamespace(look=lambda: None)

    torch.distributed.barrier = lambda *args, **kwargs: None
    torch.get_device_module = lambda *args: SimpleNamespace(synchronize=lambda: None)

    class Worker:
        model_runner = SimpleNamespace(
            model=torch.nn.Linear(1, 1), server_args=SimpleNamespace(weight_cache_mode="off")
        )

        def __getattr__(self, update):
            return lambda request: log.append(update) or (True, "")

    updater = SchedulerWeightUpdaterManager(
        tp_worker=Worker(),
        draft_worker=None,
        tp_cpu_group=None,
        memory_saver_adapter=SimpleNamespace(pause=lambda tag: log.append(f"{tag} away")),
        flush_cache=lambda **kwargs: log.append("flush") or True,
        is_fully_idle=lambda: True,
    )
    state.answered((Sample(0, array("q", [1, 2])),), torch.zeros(1, 4))
    if call:
        method, request = call.split("/")
        getattr(updater, method)(getattr(io_struct, request)(**fields))
    state.on_idle()
    now[0] += IDLE_SECONDS
    state.on_idle()
    return [event for i, event in enumerate(log) if event != "gates sent on" or event not in log[:i]]


def test_without_either_the_hit_is_verified(sandbox):
    assert sandbox(events, "", {}) == ["gates sent on", "cold prefill"]


@pytest.mark.parametrize("tags", [["weights"], ["cuda_graph"], ["weights", "cuda_graph"]])
def test_nothing_runs_without_its_memory(tags, sandbox):
    """SGLang flushes its cache for `kv_cache` only, and calls its idle checks all the time."""
    happened = sandbox(events, "release_memory_occupation/ReleaseMemoryOccupationReqInput", {"tags": tags})
    assert happened == ["gates sent on", *(f"{tag} away" for tag in tags)]


@pytest.mark.parametrize(
    "update, fields",
    [
        ("update_weights_from_disk/UpdateWeightFromDiskReqInput", {"model_path": "m"}),
        (
            "update_weights_from_distributed/UpdateWeightsFromDistributedReqInput",
            {"names": [], "dtypes": [], "shapes": []},
        ),
        ("update_weights_from_tensor/UpdateWeightsFromTensorReqInput", {"serialized_named_tensors": []}),
        ("update_weights_from_ipc/UpdateWeightsFromIPCReqInput", {"zmq_handles": {}}),
    ],
)
def test_hits_are_not_compared_with_new_weights(update, fields, sandbox):
    """With `flush_cache` off SGLang keeps its cache: of several updates in a row only the last one flushes."""
    assert sandbox(events, update, {**fields, "flush_cache": False}) == [update.split("/")[0], "gates sent on"]
