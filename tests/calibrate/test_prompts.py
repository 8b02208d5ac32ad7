"""Prompts have the tokens that they should, and a file that has none says where."""

import json

import pytest

from sglang_tailreplay.calibrate.prompts import cut, generated, read
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.tiny_model import write_tiny_model


def test_generated_prompts_ask_for_passages_all_over_the_prefix():
    found = generated([300] * 10, 16, 1000, seed=1)
    assert found == generated([300] * 10, 16, 1000, seed=1) != generated([300] * 10, 16, 1000, seed=2)
    places = []
    for ids in found:
        assert len(ids) == 316 and min(ids) >= 4 and max(ids) < 1000
        places.append(next(i for i in range(285) if ids[i : i + 16] == ids[300:]))
    assert places == sorted(places) and places[0] < 30 and places[-1] > 250


def test_the_end_of_a_prompt_is_kept():
    assert cut([[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 1, 1]], [2, 2], 1) == [[1, 2, 3], [7, 8, 9]]


def test_each_prompt_has_a_boundary_of_its_own_and_those_too_short_for_any_are_left_out():
    assert cut([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [2, 1], 1) == [[1, 2, 3], [8, 9]]
    assert [len(ids) for ids in generated([40, 21, 33], 16, 1000, seed=1)] == [56, 37, 49]


def test_ids_need_no_tokenizer_and_texts_do(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input_ids": [5, 6]}\n\n{"input_ids": [7]}\n')
    assert read(file, "no such model") == [[5, 6], [7]]
    file.write_text('{"prompt": "a text"}\n')
    with pytest.raises(TailReplayError, match="brings no tokenizer"):
        read(file, str(tmp_path))


def test_texts_are_read_by_the_models_own_tokenizer(tmp_path):
    write_tiny_model(tmp_path / "model", num_hidden_layers=4)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n{"text": "ab"}\n{"input_ids": [9]}\n')
    abc, ab, given = read(file, str(tmp_path / "model"))
    assert len(abc) == 3 and ab == abc[:2] and given == [9]


@pytest.mark.parametrize("line", ["no json", "[1]", "{}", '{"input_ids": []}', '{"input_ids": [-1]}', '{"prompt": 3}'])
def test_a_bad_line_is_named(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"input_ids": [1]}) + "\n" + line + "\n")
    with pytest.raises(TailReplayError, match="line 2"):
        read(file, "M")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TailReplayError, match="--prompts"):
        read(tmp_path / "none", "M")
