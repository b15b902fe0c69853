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
    network = build_network(NetworkConfig(hidden=1, layers=0), 1)
    with torch.no_grad():
        for layer in linears(network):
            layer.weight.fill_(1.0)
        outputs = network(torch.tensor([[3.0], [-3.0]]))
    torch.testing.assert_close(outputs, torch.tensor([[3.0, 3.0], [-0.03, -0.03]]))


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


def count(network: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def test_cnn_has_about_as_many_weights_as_the_mlp() -> None:
    cnn = build_network(NetworkConfig("cnn", shape=(28, 28)), 784)
    assert count(cnn) == pytest.approx(count(build_network(NetworkConfig(), 784)), rel=0.1)


@pytest.mark.parametrize(
    ("shape", "n_inputs"), [((28, 28), 784), ((16, 16), 256), ((7, 5, 3), 105), ((1, 9), 9)]
)
def test_cnn_takes_images_of_any_shape(shape: tuple[int, ...], n_inputs: int) -> None:
    network = build_network(NetworkConfig("cnn", hidden=16, shape=shape), n_inputs)
    assert network(torch.zeros(3, n_inputs)).shape == (3, 2)


def test_cnn_sees_channels_as_the_last_axis() -> None:
    network = build_network(NetworkConfig("cnn", hidden=16, shape=(4, 5, 3)), 60)
    image = torch.arange(60.0).view(1, 60)
    assert isinstance(network, torch.nn.Sequential)
    assert torch.equal(network[0](image)[0], image.view(4, 5, 3).permute(2, 0, 1))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (None, "needs the images' shape"),
        ((784,), r"needs the images' shape.* found \[784\]"),
        ((28, 27), r"shape \[28, 27\] holds 756 values, the rows have 784"),
    ],
)
def test_images_of_the_wrong_shape_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_network(NetworkConfig("cnn", shape=shape), 784)


def test_residual_blocks_add_to_what_goes_in() -> None:
    network = build_network(NetworkConfig("residual", hidden=32, layers=2), 8)
    assert len(linears(network)) == 6
    with torch.no_grad():
        for layer in linears(network)[1:5]:
            layer.weight.zero_()
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
        assert isinstance(network, torch.nn.Sequential)
        entered = network[1](network[0](x))
        twice = torch.nn.functional.gelu(torch.nn.functional.gelu(entered))
        torch.testing.assert_close(network[:-1](x), twice)


def test_own_network_is_imported_seeded_and_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    kind = "tests.encoders.own:Own"
    same, again, other = (build_network(NetworkConfig(kind), 8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(linears(same)[0].weight, linears(again)[0].weight)
    assert not torch.equal(linears(same)[0].weight, linears(other)[0].weight)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.encoders.own:narrow", "narrow does not take rows of 8 values"),
        ("tests.encoders.own:wide", r"turns \(2, 8\) into \(2, 3\); it must give \(2, 2\)"),
        ("tests.encoders.own:weightless", "has no weights that can be trained; give it some"),
        ("tests.encoders.own:nothing", "gave a int; it must give a torch.nn.Module"),
        ("tests.encoders.own:missing", "cannot be imported"),
        ("no_such_package.module:Net", "cannot be imported .* install its package"),
    ],
)
def test_own_networks_that_do_not_fit_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_network(NetworkConfig(name), 8)
