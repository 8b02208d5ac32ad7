"""A checkpoint with a vision tower: text is reused at any token, images are served without reuse and harm nobody.

Every answer is compared with transformers' own model of the same checkpoint (r = 1, float32)."""

from __future__ import annotations

import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_tailreplay.tiny_model import VISION_TOKENS, write_tiny_model

NEW = 10
CHUNK = 256  # --chunked-prefill-size of the server
START, END, IMAGE = range(1024 - len(VISION_TOKENS), 1023)
IMAGE_TOKENS = 16  # of a picture of 64 x 64 pixels: patches of 8 x 8, of which 2 x 2 are a token


# The mixture differs below the vision tower only, where tests/serving/test_families.py covers it.
@pytest.fixture(scope="module", params=["qwen3_5_vl", pytest.param("qwen3_5_moe_vl", marks=pytest.mark.slow)])
def checkpoint(request, tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp(request.param), dtype=torch.float32, family=request.param)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint, serve_tiny):
    """Its warm-up is a chat request with an image."""
    with serve_tiny("--tail-replay-ratio", "1.0", "--enable-metrics", model=checkpoint) as server:
        yield server


class Reference:
    def __init__(self, checkpoint):
        import transformers

        load = transformers.AutoModelForImageTextToText.from_pretrained
        self.model = load(checkpoint, dtype=torch.float32).eval()
        self.processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(checkpoint)

    @torch.no_grad()
    def follows(self, ids, tokens, picture=None) -> bool:
        """Whether greedy decoding of ids, which hold the tokens of the picture, gives these tokens."""
        whole, images = torch.tensor([[*ids, *tokens]]), {}
        if picture is not None:
            images = dict(self.processor([picture], return_tensors="pt"))
            images["mm_token_type_ids"] = (whole == IMAGE).int()
        logits = self.model(input_ids=whole, **images).logits[0, len(ids) - 1 : -1]
        return logits.argmax(-1).tolist() == list(tokens)


def picture(seed: int):
    from PIL import Image

    pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())


def expanded(before, after, tokens: int = IMAGE_TOKENS) -> list[int]:
    return [*before, START, *[IMAGE] * tokens, END, *after]


def show(server, before, image, after):
    """The answer to a prompt with an image in it: its tokens, and how many of the prompt were cached."""
    file = io.BytesIO()
    image.save(file, "PNG")
    reply = server.post(
        "/generate",
        {
            "input_ids": expanded(before, after, tokens=1),  # SGLang puts in as many as the image takes
            "image_data": base64.b64encode(file.getvalue()).decode(),
            "sampling_params": {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True},
        },
    )
    return reply["output_ids"], reply["meta_info"]["cached_tokens"]


def test_text_hits_at_any_token(server, reference, prompt):
    """In a long prompt that was prefilled in three pieces, at a piece's end, and inside an answer."""
    ids = prompt(600)
    answer = server.generate(ids, NEW)
    assert answer.cached_tokens == 0 and reference.follows(ids, answer.tokens)
    whole = [*ids, *answer.tokens]
    for boundary in (1, CHUNK, 333, 604):
        branch = [*whole[:boundary], whole[boundary] ^ 1 or 2, *prompt(20)]
        found = server.generate(branch, NEW)
        assert (found.cached_tokens, found.matched, found.replayed) == (boundary, boundary, boundary)
        assert reference.follows(branch, found.tokens)


def test_an_image_is_served_without_reuse(server, reference, prompt):
    """Neither of the text before it, which is cached, nor of itself the second time; and it is seen."""
    before, after = prompt(90), prompt(20)
    server.generate(before, 1)
    answers = []
    for image in (picture(1), picture(1), picture(2)):
        tokens, cached = show(server, before, image, after)
        assert cached == 0
        assert reference.follows(expanded(before, after), tokens, image)
        answers.append(tokens)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("length", [CHUNK - 5, CHUNK, 2 * CHUNK + 100])
def test_an_image_in_a_prompt_of_several_pieces(server, reference, prompt, length):
    """One piece ends inside the image in the first case, before its first token in the second."""
    before, after = prompt(length - 1), prompt(300)
    tokens, cached = show(server, before, picture(length), after)
    assert cached == 0 and reference.follows(expanded(before, after), tokens, picture(length))


def test_text_after_an_image_is_right(server, reference, prompt):
    """The tree has the image's text without rows: the first text computes it anew, from then on it is reused."""
    before, after = prompt(100), prompt(30)
    seen, _ = show(server, before, picture(3), after)
    for cached in (0, len(before)):
        ids = [*before, *prompt(20)]
        answer = server.generate(ids, NEW)
        assert answer.cached_tokens == cached and reference.follows(ids, answer.tokens)
    # The image's own tokens, said in words: they are not the image.
    words = [*expanded(before, after), *seen]
    answer = server.generate(words, NEW)
    assert answer.cached_tokens == len(before)
    assert reference.follows(words, answer.tokens)


def test_images_and_hits_in_one_batch(server, reference, prompt):
    ids = prompt(300)
    server.generate(ids, 1)

    def ask(i):
        before, after = ids[: 60 * i + 30], prompt(8 + i)
        if i % 2:
            tokens, cached = show(server, before, picture(i), after)
            return cached, reference.follows(expanded(before, after), tokens, picture(i))
        answer = server.generate([*before, *after], NEW)
        return answer.cached_tokens, reference.follows([*before, *after], answer.tokens)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [(30, True), (0, True), (150, True), (0, True)]


def test_a_chat_with_an_image(server):
    file = io.BytesIO()
    picture(4).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    for _ in range(2):
        usage = server.post("/v1/chat/completions", body)["usage"]
        assert usage["prompt_tokens"] == len("<|user|>What is this?\n<|assistant|>") + IMAGE_TOKENS + 2
        assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def test_nothing_is_left(server, prompt):
    """Idle and empty, SGLang's leak check and ours have run: they take the server down if something does not add up."""
    show(server, prompt(50), picture(5), prompt(10))
    time.sleep(1.5)
    server.flush()
    time.sleep(1.5)
    server.check_alive()
    assert server.metrics()["sglang:tail_replay_rows_used"] == 0
