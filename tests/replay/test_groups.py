import pytest

from sglang_tailreplay.replay.groups import EMBEDDING, Group, find_groups

F, L = "full_attention", "linear_attention"


@pytest.mark.parametrize(
    "kinds, groups",
    [
        ([L, L, L, F] * 2, [Group(EMBEDDING, (0, 1, 2), -1), Group(3, (4, 5, 6), 0)]),
        ([F, L, F, L, L], [Group(0, (1,), 0), Group(2, (3, 4), 1)]),
        ([L, F, F, L, F, F], [Group(EMBEDDING, (0,), -1), Group(2, (3,), 0)]),
        ([F, F, F, L], [Group(2, (3,), 0)]),
        ([L, F], [Group(EMBEDDING, (0,), -1)]),
    ],
)
def test_groups_of(kinds, groups):
    assert list(find_groups(kinds)) == groups


def test_every_gdn_layer_once_and_rows_dense():
    kinds = [L, F, L, L, F, F, L, F]
    groups = find_groups(kinds)
    assert [i for group in groups for i in group.layers] == [i for i, kind in enumerate(kinds) if kind == L]
    assert [group.row for group in groups] == [-1, 0, 1]


@pytest.mark.parametrize(
    "kinds, word",
    [([L, L], "full_attention"), ([F], "linear_attention"), ([], "full_attention"), ([L, F, "mamba2"], "mamba2")],
)
def test_other_models_are_refused(kinds, word):
    with pytest.raises(ValueError, match=word):
        find_groups(kinds)
