"""Entry point of the group `sglang.srt.plugins`: SGLang calls register() early in each of its processes."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang_tailreplay.config import BACKEND
from sglang_tailreplay.errors import TailReplayError

logger = logging.getLogger(__name__)
DISABLE = "TAILREPLAY_DISABLE"
DISABLED = f"{DISABLE}=1 keeps the plugin from registering: unset it"


def is_disabled() -> bool:
    return os.environ.get(DISABLE) == "1"


def register() -> None:
    """Make --radix-cache-backend tail_replay known. Everything else waits until it is chosen.

    SGLang logs an exception of a plugin and goes on without it. So what fails here is kept and raised when somebody
    asks for the backend: a stock SGLang beside this package never suffers.
    """
    from sglang.srt.mem_cache import registry

    from sglang_tailreplay import cpu

    if cpu.stand_in_active():
        from sglang_tailreplay.cpu import hooks as cpu_hooks

        cpu_hooks.register()
    if is_disabled() or BACKEND in registry.registered_radix_cache_backends():
        return
    registry.register_radix_cache_backend(BACKEND, _create_cache)
    _register_models()
    try:
        _install_entry_hooks()
    except TailReplayError as error:
        _refuse_when_chosen(str(error))
    except Exception as error:  # whatever it is, nobody but the users of this backend should see it
        _refuse_when_chosen(f"tail_replay: the plugin failed to load: {type(error).__name__}: {error}")


def _register_models() -> None:
    """Models that SGLang lacks need none of this project's caches, and a stock SGLang must not suffer for them."""
    from sglang_tailreplay import compat, models

    try:
        if compat.version_problem() is None:
            models.register()
    except Exception as error:
        logger.warning("tail_replay: OLMo-Hybrid is not available: %s: %s", type(error).__name__, error)


def _install_entry_hooks() -> None:
    from sglang_tailreplay import compat

    problem = compat.version_problem()
    if problem:
        raise TailReplayError(f"tail_replay: {problem}")
    from sglang_tailreplay import hooks

    hooks.install(hooks.ENTRY)


def _refuse_when_chosen(message: str) -> None:
    """The factory would be too late for a clear message: SGLang's own argument checks come first."""
    from sglang.srt.server_args import ServerArgs

    original = ServerArgs.__post_init__

    def post_init(server_args: Any) -> None:
        if server_args.radix_cache_backend == BACKEND:
            raise TailReplayError(message)
        original(server_args)

    ServerArgs.__post_init__ = post_init


def _create_cache(ctx: Any) -> Any:
    from sglang_tailreplay import runtime

    return runtime.current().create_cache(ctx)
