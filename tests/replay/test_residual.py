"""What a replay leaves out of a state: no more than a head's gates keep of what was missing."""

import pytest
import torch

from sglang_tailreplay.replay import naive
from sglang_tailreplay.replay.groups import find_groups

M = 400


def sizes(state):
    """Norms of every head's part of a state [HV, V, K]."""
    return state.flatten(1).norm(dim=1)


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_the_delta_rule_keeps_no_more_than_the_gates_do(most):
    """Whatever keys, values and write strengths up to `most` are, and whatever the state was off by."""
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(50, 2, 8, generator=made) for _ in range(2))
    k[20:] = k[:1]  # many writes along one direction
    v, state, off = torch.randn(50, 4, 6, generator=made), *torch.randn(2, 4, 6, 8, generator=made)
    g = -torch.rand(50, 4, generator=made) / 20
    beta = most * torch.rand(50, 4, generator=made)
    beta[10:30] = most
    kept = g.cumsum(0).exp()
    for n in (1, 2, 7, 50):
        ends = [naive.gated_delta_rule(q[:n], k[:n], v[:n], g[:n], beta[:n], s)[1] for s in (state, state + off)]
        assert (sizes(ends[1] - ends[0]) <= kept[n - 1] * sizes(off) * (1 + 1e-5)).all()


@pytest.fixture
def truth(make_model, prefill, tokens):
    """A prefill of M tokens, and the log-gates [M, HV] of every GDN layer in it."""
    model, gates, hooks = make_model("ends-with-GDN"), {}, []
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer, "linear_attn"):
            gdn = layer.linear_attn

            def note(module, args, a, i=i, gdn=gdn):
                gates[i] = naive.gates(a[0], a[0], gdn.A_log, gdn.dt_bias)[0]

            hooks.append(gdn.in_proj_a.register_forward_hook(note))
    whole = prefill(model, tokens(M))
    for hook in hooks:
        hook.remove()
    return model, whole, gates


@pytest.mark.parametrize("k", [20, 64, 200])
def test_a_replayed_state_is_off_by_no_more_than_that(k, truth, prefill, replay, tokens):
    """For the first layer of every group, whose input is exact. Those behind it are fed by one that is off, and what
    they are off by in turn is not covered."""
    model, whole, gates = truth
    before = prefill(model, tokens(M)[: M - k])
    pool, (slot,) = replay(model, [whole.rows], [k])
    for group in find_groups(model.config.layer_types):
        layer = group.layers[0]
        kept = gates[layer][M - k :].sum(0).exp()
        off = sizes(pool.recurrent[layer][slot] - whole.recurrent[layer])
        allowed = kept * sizes(before.recurrent[layer])
        # The empty window of the convolution makes the first writes wrong, too: by less than the bound has to spare.
        assert (off <= allowed + 1e-5 * sizes(whole.recurrent[layer])).all(), (layer, off / allowed)
        assert off.max() > 0.001 * sizes(whole.recurrent[layer]).max(), "nothing was left out"
