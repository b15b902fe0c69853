import pytest
import torch

from encoders.networks import NetworkConfig, build_network


def linears(network: torch.nn.Module) -> list[torch.nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]


def test_default_network_has_input_layer_three_hidden_layers_and_output() -> None:
    shapes = [tuple(layer.weight.shape) for layer in linears(build_network(NetworkConfig(), 64))]
    assert shapes == [(256, 64), (256, 256), (256, 256), (256, 256), (2, 256)]


def test_hidden_layers_have_weights_of_their_own() -> None:
    _, first, second, _, _ = linears(build_network(NetworkConfig(), 64))
    assert not torch.equal(first.weight, second.weight)


def test_hidden_layers_leak_and_the_output_is_linear() -> None:
    network = build_network(NetworkConfig(hidden=1, layers=0), 1, 1)
    with torch.no_grad():
        for layer in linears(network):
            layer.weight.fill_(1.0)
        outputs = network(torch.tensor([[3.0], [-3.0]]))
    torch.testing.assert_close(outputs, torch.tensor([[3.0], [-0.03]]))


def test_weights_are_xavier_with_zero_bias() -> None:
    first = linears(build_network(NetworkConfig(hidden=300), 500))[0]
    limit = (6 / 800) ** 0.5
    assert first.weight.abs().max() <= limit
    assert first.weight.std().item() == pytest.approx(limit / 3**0.5, rel=0.01)
    assert not first.bias.any()


def test_seed_alone_decides_the_weights() -> None:
    before = torch.random.get_rng_state()
    same, again, other = (build_network(NetworkConfig(), 8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(linears(same)[0].weight, linears(again)[0].weight)
    assert not torch.equal(linears(same)[0].weight, linears(other)[0].weight)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'rnn' is unknown; use 'mlp'"):
        build_network(NetworkConfig(kind="rnn"), 8)


@pytest.mark.parametrize(
    ("config", "n_inputs"),
    [(NetworkConfig(hidden=0), 8), (NetworkConfig(layers=-1), 8), (NetworkConfig(), 0)],
)
def test_impossible_widths_are_refused(config: NetworkConfig, n_inputs: int) -> None:
    with pytest.raises(ValueError, match="widths must be at least 1"):
        build_network(config, n_inputs)
