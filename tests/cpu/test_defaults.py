"""Which flags and paths a CPU start adds, and that it leaves alone what is there."""

import os
import subprocess
import sys

import pytest
import torch

from sglang_tailreplay import cpu
from sglang_tailreplay.cpu import hooks

MEMORY = 16 << 30


def flags(arguments: list[str]) -> dict[str, str]:
    return dict(argument.partition("=")[::2] for argument in arguments)


def test_every_argument_is_one_flag_with_its_value():
    added = flags(cpu.default_arguments([], MEMORY))
    assert added["--device"] == "cpu"
    assert added["--attention-backend"] == "torch_native"
    assert added["--max-total-tokens"] == "16384"


@pytest.mark.parametrize("given", [["--max-total-tokens", "300"], ["--max-total-tokens=300"]])
def test_a_flag_of_the_user_is_not_added(given):
    added = flags(cpu.default_arguments(["--model-path", "m", *given], MEMORY))
    assert "--max-total-tokens" not in added
    assert "--device" in added


def test_a_value_that_looks_like_a_flag_name_does_not_hide_the_default():
    assert "--device" in flags(cpu.default_arguments(["--served-model-name", "device"], MEMORY))


def test_the_number_of_state_slots_is_left_to_the_cache():
    assert not any("mamba" in argument for argument in cpu.default_arguments([], MEMORY))


def test_little_memory_means_fewer_tokens():
    assert flags(cpu.default_arguments([], 1 << 30))["--max-total-tokens"] == "4096"


def test_arguments_are_not_modified():
    argv = ["--port", "1"]
    cpu.default_arguments(argv, MEMORY)
    assert argv == ["--port", "1"]


def in_fresh_process(code: str, **environ: str) -> str:
    ours = ("PYTHONPATH", "OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE")
    inherited = {key: value for key, value in os.environ.items() if key not in ours}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=inherited | environ, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


ACTIVATE = "import os, sys; from sglang_tailreplay import cpu; cpu.activate();"


def test_activation_reaches_a_spawned_process():
    child = "import sgl_kernel, torch; print(hasattr(torch.ops.sgl_kernel, 'fused_gdn_gating_cpu'))"
    code = f"{ACTIVATE} import subprocess; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert in_fresh_process(code) == "True"


def test_activation_twice_adds_nothing():
    code = f"{ACTIVATE} first = (os.environ['PYTHONPATH'], list(sys.path)); cpu.activate();"
    assert in_fresh_process(f"{code} print(first == (os.environ['PYTHONPATH'], sys.path))") == "True"


def test_images_are_prepared_without_the_stand_in_of_torchvision(tmp_path):
    """transformers would call it. A torchvision that works is left to it."""
    flag = "--disable-fast-image-processor"
    count = f"{ACTIVATE} print([cpu.default_arguments(given, 1 << 34).count('{flag}') for given in ([], ['{flag}'])])"
    usable, broken = tmp_path / "usable", tmp_path / "broken"
    for folder, content in ((usable, ""), (broken, "raise RuntimeError('made for another torch')")):
        (folder / "torchvision").mkdir(parents=True)
        (folder / "torchvision" / "__init__.py").write_text(content)
    assert in_fresh_process(count, PYTHONPATH=str(usable)) == "[0, 0]"
    assert in_fresh_process(count, PYTHONPATH=str(broken)) == "[1, 0]"


def test_settings_of_the_user_survive(tmp_path):
    code = f"{ACTIVATE} print(os.environ['OMP_NUM_THREADS'], os.environ['PYTHONPATH'].split(os.pathsep)[-1])"
    assert in_fresh_process(code, OMP_NUM_THREADS="3", PYTHONPATH=str(tmp_path)) == f"3 {tmp_path}"


def test_an_installed_cpu_build_is_used(tmp_path):
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\ntorch.ops.sgl_kernel.chunk_gated_delta_rule_cpu = print\n")
    code = f"{ACTIVATE} import sgl_kernel; print(cpu.stand_in_active(), sgl_kernel.__file__)"
    assert in_fresh_process(code, PYTHONPATH=str(tmp_path)) == f"False {package / '__init__.py'}"


def test_a_package_that_fails_to_import_is_replaced(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    code = f"{ACTIVATE} from torchvision.transforms import InterpolationMode, functional; print('ok')"
    assert in_fresh_process(code, PYTHONPATH=str(tmp_path)) == "ok"


def test_hooks_attach_and_a_missing_target_stops_the_start():
    code = f"""{ACTIVATE}
from sglang_tailreplay.cpu import hooks
from sglang.srt.plugins.hook_registry import HookRegistry
targets = hooks.register()
assert targets and set(targets) <= set(HookRegistry._hooks)
import torch
torch.empty(1, pin_memory=not torch.accelerator.is_available())
try:
    hooks.require_target("sglang.srt.no_such_module.Nothing")
except LookupError as error:
    print(error)
"""
    assert "no_such_module" in in_fresh_process(code)


def test_a_vocabulary_mask_forbids_tokens_whose_bit_is_0():
    logits = torch.zeros(2, 40)
    masks = torch.tensor([[-1, -1], [1 << 31 | 2, 1]], dtype=torch.int64).to(torch.int32)  # bit 31 is int32's sign
    hooks.apply_vocab_mask(None, logits, masks)
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [1, 31, 32]


def test_a_triton_kernel_without_triton_fails_by_name():
    code = f"""{ACTIVATE}
import triton
import triton.language as tl
from triton.language.extra import libdevice

@triton.autotune(configs=[triton.Config(dict(BLOCK=64), num_warps=4)], key=["n"])
@triton.jit(do_not_specialize=["n"])
def doubled(pointer, n, BLOCK: tl.constexpr, dtype: tl.dtype | None = None):
    pass

try:
    doubled[(1,)](None, 1)
except RuntimeError as error:
    print(error)
"""
    skip_with_triton()
    assert "doubled" in in_fresh_process(code)


def test_a_compiled_function_runs_without_triton():
    """SGLang's vision towers have some. torch.compile fails where it takes the stand-in for a Triton."""
    skip_with_triton()
    code = f"{ACTIVATE} import torch; print(torch.compile(lambda x: x + 1)(torch.ones(1)).item())"
    assert in_fresh_process(code) == "2.0"


def skip_with_triton():
    if in_fresh_process(f"{ACTIVATE} print(cpu.is_stand_in('triton'))") == "False":
        pytest.skip("the real Triton is installed")
