"""How many recurrent states the GPU has room for: those of running requests, as nothing else ever holds one here."""

# Slots when --max-running-requests does not say how many: this share of the memory for caches, within bounds.
STATE_SHARE, LEAST_SLOTS, MOST_SLOTS = 0.1, 8, 256
MOST_STATE_SHARE = 0.5  # whatever --max-running-requests says, about what SGLang's own default gives to states


def choose_state_slots(max_running_requests: int | None, rest_bytes: int, state_bytes: int) -> int:
    """One slot per running request, of `state_bytes` each, in the memory for states and KV. SGLang caps the running
    requests by the slots."""
    if max_running_requests is not None:
        return max(1, min(max_running_requests, int(rest_bytes * MOST_STATE_SHARE) // state_bytes))
    return max(LEAST_SLOTS, min(MOST_SLOTS, int(rest_bytes * STATE_SHARE) // state_bytes))
