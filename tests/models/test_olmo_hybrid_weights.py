"""Every tensor of a checkpoint has one place in the model, and a checkpoint that does not fit is refused by name."""

import pytest
import torch

from sglang_tailreplay.cpu import activate

activate()
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

# transformers must find the stand-ins first
from sglang_tailreplay.models.olmo_hybrid_config import OlmoHybridConfig, rope_of  # noqa: E402
from sglang_tailreplay.models.olmo_hybrid_weights import destinations, load  # noqa: E402
from sglang_tailreplay.tiny_model import write_tiny_model  # noqa: E402

GDN, FA = "model.layers.0.", "model.layers.3."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Config and tensors as transformers wrote them."""
    path = write_tiny_model(
        tmp_path_factory.mktemp("olmo"), dtype=torch.float32, family="olmo_hybrid", num_hidden_layers=4
    )
    return OlmoHybridConfig.from_pretrained(path), safetensors.load_file(path / "model.safetensors")


@pytest.fixture
def config(checkpoint):
    return checkpoint[0]


@pytest.fixture
def tensors(checkpoint):
    return dict(checkpoint[1])


class Recorder(torch.nn.Module):
    """Parameters by their dotted names; remembers what was loaded where."""

    def __init__(self, config):
        super().__init__()
        self.found = {}
        self._parameters_by_name = {}
        for destination in destinations(config).values():
            parameter = torch.nn.Parameter(torch.empty(0))
            parameter.weight_loader = self._record(destination.parameter)
            self._parameters_by_name[destination.parameter] = parameter

    def _record(self, name):
        def loader(parameter, tensor, shard=None):
            assert (name, shard) not in self.found
            self.found[name, shard] = tensor

        return loader

    def named_parameters(self, *args, **kwargs):
        return iter(self._parameters_by_name.items())


def loaded(config, tensors, complete=True):
    model = Recorder(config)
    load(model, config, tensors.items() if isinstance(tensors, dict) else tensors, complete)
    return model.found


def test_every_tensor_that_transformers_writes_is_loaded_once(config, tensors):
    found = loaded(config, tensors)
    assert len(found) == len(tensors) == len(destinations(config))
    assert torch.equal(
        found["model.layers.0.linear_attn.in_proj_qkvg.weight", 3], tensors[f"{GDN}linear_attn.g_proj.weight"]
    )
    assert torch.equal(
        found["model.layers.0.linear_attn.in_proj_ba.weight", 0], tensors[f"{GDN}linear_attn.b_proj.weight"]
    )
    assert torch.equal(found["model.layers.3.self_attn.qkv_proj.weight", "v"], tensors[f"{FA}self_attn.v_proj.weight"])


def test_norms_under_either_name_are_the_same_norms(config, tensors):
    written = loaded(config, tensors)
    module_names = {
        name.replace(".attention_layer_norm.", ".input_layernorm.").replace(
            ".feedforward_layer_norm.", ".post_attention_layernorm."
        ): tensor
        for name, tensor in tensors.items()
    }
    assert module_names.keys() != tensors.keys()
    found = loaded(config, module_names)
    assert found.keys() == written.keys()
    assert all(torch.equal(found[key], written[key]) for key in found)


def test_one_convolution_over_all_streams_is_split(config, tensors):
    separate = loaded(config, tensors)
    for index in config.linear_layer_ids:
        prefix = f"model.layers.{index}.linear_attn."
        tensors[f"{prefix}conv1d.weight"] = torch.cat([tensors.pop(f"{prefix}{s}_conv1d.weight") for s in "qkv"])
    found = loaded(config, tensors)
    assert found.keys() == separate.keys()
    assert all(torch.equal(found[key], separate[key]) for key in found)


def test_tensors_of_no_use_are_ignored(config, tensors):
    extra = {"mtp.layers.0.weight": torch.ones(1), f"{FA}self_attn.rotary_emb.inv_freq": torch.ones(1)}
    assert loaded(config, tensors | extra).keys() == loaded(config, tensors).keys()


def test_tied_embeddings_need_no_head(config, tensors):
    tied = OlmoHybridConfig(**config.to_dict() | {"tie_word_embeddings": True})
    without = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    assert loaded(tied, without).keys() == loaded(tied, tensors).keys()
    with pytest.raises(ValueError, match=r"missing, the first is lm_head\.weight"):
        loaded(config, without)


def test_biases_where_the_config_has_them(config, tensors):
    biased = OlmoHybridConfig(**config.to_dict() | {"attention_bias": True})
    with pytest.raises(
        ValueError, match=r"4 tensors are missing, the first is .*layers\.3\.self_attn\.[qkvo]_proj\.bias"
    ):
        loaded(biased, tensors)
    with pytest.raises(ValueError, match=r"self_attn\.q_proj\.bias is not one of"):
        loaded(config, tensors | {f"{FA}self_attn.q_proj.bias": torch.ones(96)})


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        f"{GDN}linear_attn.A_log",
        f"{GDN}linear_attn.v_conv1d.weight",
        f"{GDN}mlp.up_proj.weight",
        f"{FA}self_attn.k_norm.weight",
    ],
)
def test_a_missing_tensor_is_named(config, tensors, name):
    del tensors[name]
    with pytest.raises(ValueError) as error:
        loaded(config, tensors)
    assert str(error.value) == f"checkpoint: 1 tensors are missing, the first is {name}"


def test_a_tensor_of_another_shape_is_named(config, tensors):
    name = f"{GDN}linear_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1]
    with pytest.raises(ValueError, match=rf"{name} has shape \(71, 96\), config.json says \(72, 96\)"):
        loaded(config, tensors)


def test_a_joined_convolution_of_another_shape_is_named(config):
    with pytest.raises(ValueError, match=r"conv1d\.weight has shape \(9, 1, 4\), config.json says \(288, 1, 4\)"):
        loaded(config, {f"{GDN}linear_attn.conv1d.weight": torch.ones(9, 1, 4)})


def test_a_tensor_that_comes_twice_is_named(config, tensors):
    twice = [*tensors.items(), (f"{GDN}input_layernorm.weight", tensors[f"{GDN}attention_layer_norm.weight"])]
    with pytest.raises(ValueError, match=r"layers\.0\.input_layernorm\.weight comes twice"):
        loaded(config, twice)


def test_a_checkpoint_of_another_model_is_refused(config, tensors):
    with pytest.raises(ValueError, match=r"model\.layers\.4\.linear_attn\.A_log is not one of"):
        loaded(config, tensors | {"model.layers.4.linear_attn.A_log": torch.ones(3)})


def test_an_update_may_bring_a_part(config, tensors):
    name = f"{GDN}linear_attn.A_log"
    assert list(loaded(config, {name: tensors[name]}, complete=False)) == [(name, None)]


@pytest.mark.parametrize("rope", [{"rope_theta": None}, {"rope_type": "default", "rope_theta": None}])
def test_a_config_without_theta_has_no_position_embedding(rope):
    assert rope_of(OlmoHybridConfig(rope_parameters=rope)) is None


def test_a_config_with_theta_has_one():
    assert rope_of(OlmoHybridConfig(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))["rope_theta"] == 5e5


def test_layers_of_the_released_shape():
    config = OlmoHybridConfig()
    assert config.full_attention_layer_ids == [3, 7, 11, 15, 19, 23, 27, 31]
    assert sorted(config.full_attention_layer_ids + config.linear_layer_ids) == list(range(32))
    assert (config.key_dim, config.value_dim) == (2880, 5760)
