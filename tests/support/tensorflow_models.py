"""Training graphs as tf.compat.v1 builds them, and TensorFlow's own Grappler on them. Needs TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, rewriter_config_pb2
from tensorflow.python.grappler import cluster as clusters
from tensorflow.python.grappler import tf_optimizer

v1 = tf.compat.v1
GPU = "/gpu:0"
OTHERS = (
    "layout_optimizer constant_folding shape_optimization remapping common_subgraph_elimination "
    "arithmetic_optimization dependency_optimization loop_optimization function_optimization debug_stripper "
    "scoped_allocator_optimization implementation_selector auto_mixed_precision pin_to_host_optimization"
).split()


def _trained(graph: Any, loss: Any) -> tuple[Any, tuple[str, str]]:
    """The GraphDef of a step of gradient descent, and what is fetched of it."""
    train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    return graph.as_graph_def(add_shapes=True), (train.name, loss.op.name)


def mlp(resources: bool = True) -> tuple[Any, tuple[str, str]]:
    """Four layers of cheap ops around products, with variables of either kind; the second layer is hinted."""
    with tf.Graph().as_default() as g, tf.device(GPU):
        v1.set_random_seed(1)
        h = v1.placeholder(tf.float32, (64, 32), name="x")
        for i in range(4):
            w = v1.get_variable(f"w{i}", (32, 32), use_resource=resources)
            b = v1.get_variable(f"b{i}", (32,), use_resource=resources)
            h = tf.sigmoid(tf.nn.bias_add(tf.matmul(h, w), b)) * 2.0
            h = tf.reshape(tf.square(tf.reshape(h, (32, 64)) - 0.5), (64, 32))
            if i == 1:
                h = tf.tanh(h)
                h.op._set_attr("_recompute_hint", v1.AttrValue(i=1))
        return _trained(g, tf.reduce_mean(h))


def cnn() -> tuple[Any, tuple[str, str]]:
    """Convolutions with batch normalization and residual sums."""
    with tf.Graph().as_default() as g, tf.device(GPU):
        v1.set_random_seed(1)
        h, channels = v1.placeholder(tf.float32, (4, 16, 16, 3), name="x"), 3
        for i in range(3):
            before = h
            w = v1.get_variable(f"w{i}", (3, 3, channels, 8), use_resource=False)
            scale, offset = (v1.get_variable(f"{n}{i}", (8,), use_resource=True) for n in "so")
            channels = 8
            h = tf.nn.conv2d(h, w, 1, "SAME")
            h = tf.raw_ops.FusedBatchNorm(
                x=h, scale=scale, offset=offset, mean=[], variance=[], is_training=True
            )[0]
            h = tf.nn.relu(h)
            if i:
                h = h + before if i % 2 else tf.add_n([h, before, before])
        labels = v1.placeholder(tf.int32, (4,), name="y")
        h = tf.reshape(tf.reduce_mean(h, (1, 2)), (4, 8))
        return _trained(
            g, tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=h))
        )


def transformer(layers: int = 2) -> tuple[Any, tuple[str, str]]:
    """Attention, dropout, a normalization of its own, and a wide part with GELU."""
    with tf.Graph().as_default() as g, tf.device(GPU):
        v1.set_random_seed(1)
        h = v1.placeholder(tf.float32, (2, 16, 32), name="x")

        def product(t: Any, name: str, a: int, b: int) -> Any:
            weight = v1.get_variable(name, (a, b), use_resource=True)
            return tf.reshape(tf.matmul(tf.reshape(t, (32, a)), weight), (2, 16, b))

        def heads(t: Any) -> Any:
            return tf.transpose(tf.reshape(t, (2, 16, 4, 8)), (0, 2, 1, 3))

        for i in range(layers):
            q, k, v = (heads(product(h, f"{n}{i}", 32, 32)) for n in "qkv")
            a = tf.nn.dropout(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 8.0**0.5), rate=0.1)
            mixed = tf.reshape(tf.transpose(tf.matmul(a, v), (0, 2, 1, 3)), (2, 16, 32))
            h = h + product(mixed, f"o{i}", 32, 32)
            mean = tf.reduce_mean(h, -1, keepdims=True)
            spread = tf.math.squared_difference(h, tf.stop_gradient(mean))
            h = (h - mean) * tf.math.rsqrt(tf.reduce_mean(spread, -1, keepdims=True) + 1e-5)
            h = h + product(tf.nn.gelu(product(h, f"u{i}", 32, 64), approximate=True), f"d{i}", 64, 32)
        return _trained(g, tf.reduce_mean(tf.square(h)))


def tanh_chain() -> tuple[Any, tuple[str, str]]:
    """Large values that live long: what swapping is for."""
    with tf.Graph().as_default() as g, tf.device(GPU):
        v1.set_random_seed(1)
        h = v1.placeholder(tf.float32, (4096, 512), name="x")
        for i in range(6):
            h = tf.tanh(tf.matmul(h, v1.get_variable(f"w{i}", (512, 512), use_resource=True)))
        return _trained(g, tf.reduce_mean(h))


def branches() -> tuple[Any, tuple[str, str]]:
    """Six products of one input, summed: what accumulators are for."""
    with tf.Graph().as_default() as g, tf.device(GPU):
        v1.set_random_seed(1)
        x = v1.placeholder(tf.float32, (4096, 64), name="x")
        weights = [v1.get_variable(f"w{i}", (64, 64), use_resource=True) for i in range(6)]
        total = tf.add_n([tf.matmul(x, w) for w in weights], name="total")
        return _trained(g, tf.reduce_mean(tf.square(total)))


MODELS: dict[str, Callable[[], tuple[Any, tuple[str, str]]]] = {
    "mlp": mlp,
    "mlp_ref": lambda: mlp(resources=False),
    "cnn": cnn,
    "transformer": transformer,
    "tanh_chain": tanh_chain,
}


def feeds(proto: Any) -> dict[str, np.ndarray]:
    """A batch for the placeholders."""
    rng, found = np.random.default_rng(0), {}
    for n in proto.node:
        if n.op == "Placeholder":
            shape = [d.size for d in n.attr["shape"].shape.dim]
            whole = n.attr["dtype"].type == tf.int32.as_datatype_enum
            found[f"{n.name}:0"] = rng.integers(0, 8, shape) if whole else rng.random(shape, np.float32)
    return found


def trained(proto: Any, fetch: Sequence[str], steps: int = 3) -> list[np.ndarray]:
    """Run a graph in a session: the loss of each step, then all variables. The loss is fetched before the weights are
    trained: TensorFlow has no order between reading a reference variable and writing it."""
    with tf.Graph().as_default() as g:
        tf.import_graph_def(proto, name="")
        ops = g.get_operations()
        first = [o.name for o in ops if o.type.startswith("Assign") and o.name.endswith("/Assign")]
        state = [
            o.outputs[0] for o in ops if o.type == "VariableV2" or o.name.endswith("/Read/ReadVariableOp")
        ]
        config = v1.ConfigProto(
            allow_soft_placement=True, inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
        )
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with v1.Session(graph=g, config=config) as session:
            session.run(first)
            train, loss = fetch
            losses = []
            for _ in range(steps):
                losses.append(session.run(f"{loss}:0", feeds(proto)))
                session.run(train, feeds(proto))
            return [*losses, *session.run(state)]


def grappler(proto: Any, fetch: Sequence[str], level: str, memory: int = 1 << 40) -> Any:
    """The GraphDef after TensorFlow's own memory optimizer on a virtual GPU with so much memory: every other
    optimizer is turned off, as selecting this one by name does nothing."""
    kinds = rewriter_config_pb2.RewriterConfig
    chosen = kinds(memory_optimization=getattr(kinds, level), min_graph_nodes=-1, disable_model_pruning=True)
    chosen.memory_optimizer_target_node_name_scope = "gradients/"
    chosen.meta_optimizer_iterations = kinds.ONE
    for other in OTHERS:
        setattr(chosen, other, kinds.OFF)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.CopyFrom(chosen)
    with tf.Graph().as_default() as g:
        tf.import_graph_def(proto, name="")
        meta = v1.train.export_meta_graph(graph=g, graph_def=proto)
    meta.collection_def["train_op"].node_list.value.extend(fetch)
    return tf_optimizer.OptimizeGraph(config, meta, cluster=_cluster(memory))


def _cluster(memory: int) -> Any:
    def device(name: str, kind: str, size: int, **more: Any) -> Any:
        about = device_properties_pb2.DeviceProperties(type=kind, memory_size=size, frequency=1000, **more)
        return device_properties_pb2.NamedDevice(name=name, properties=about)

    gpu = device(
        "/GPU:0", "GPU", memory, num_cores=60, bandwidth=9 * 10**8, environment={"architecture": "7"}
    )
    return clusters.Cluster(
        devices=[gpu, device("/CPU:0", "CPU", 1 << 40, num_cores=4, bandwidth=32 * 10**6)]
    )
