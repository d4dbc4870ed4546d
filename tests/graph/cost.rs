//! Tests that the cost of a plan equals a count by hand, and which costs fusion and batching do not change.

#![allow(missing_docs)]

use std::path::Path;

use ascend_llm::graph::{
    ActivationKind, AttentionShape, Bucket, CompileOptions, Cost, CostRates, CostShape, Graph, GraphBuilder,
    LinearPart, NormSpec, Numerics, Plan, RopeFrequencies, RopeStyle, Target, Weight, WeightRole, attended_tokens,
    compile, shown_tokens,
};
use ascend_llm::model::{self, config_from_gguf, config_from_hub, decoder_graph};
use ascend_llm::weights::{DType, ModelKind};
use proptest::prelude::*;

const TARGET: Target = Target::new(128);
const BUCKET: Bucket = Bucket { tokens: 64, logit_rows: 8, seqs: 8, kv_tokens: 256 };
const MODELS: [&str; 6] = [
    "conformance/llama-gqa-tied",
    "conformance/llama-mha-untied-bias",
    "conformance/mistral-sliding",
    "conformance/qwen2",
    "conformance/qwen3",
    "fable/gguf/fable-q8_0.gguf",
];

fn graph(path: &str) -> Graph {
    let files = model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)).unwrap();
    let config = match &files.kind {
        ModelKind::Gguf(file) => config_from_gguf(file).unwrap(),
        ModelKind::Folder(folder) => config_from_hub(&std::fs::read(folder.join("config.json")).unwrap()).unwrap(),
        other => panic!("{other:?}"),
    };
    decoder_graph(&config, files.source.as_ref()).unwrap()
}

fn plan(graph: &Graph, numerics: Numerics, fusion: u8) -> Plan {
    let mut options = CompileOptions::default();
    options.fusion = Some(fusion);
    compile(graph, TARGET, numerics, &options, BUCKET).unwrap()
}

/// A graph of layers with hidden width 32: 2 query heads over 1 KV head of 16, a gated MLP of 64, a vocabulary of 10
/// ids.
///
/// All layers share the weights, which have three types. The window applies to the last layer.
fn small_graph(layers: usize, window: Option<u32>) -> Graph {
    let mut graph = GraphBuilder::new();
    let mut matrix = |name: &str, n: usize, k: usize, dtype: DType| {
        let weight = Weight::new(name, vec![n, k], dtype, WeightRole::Matrix);
        graph.weight(weight)
    };
    let table = matrix("table", 10, 32, DType::F16);
    let [q, k, v] = [("q", 32), ("k", 16), ("v", 16)].map(|(name, n)| matrix(name, n, 32, DType::F32));
    let (o, up) = (matrix("o", 32, 32, DType::F32), matrix("up", 64, 32, DType::Q8_0));
    let (gate, down) = (matrix("gate", 64, 32, DType::Q8_0), matrix("down", 32, 64, DType::Q8_0));
    let mut vector = |name: &str, len: usize| {
        let (shape, dtype, role) = (vec![len], DType::F32, WeightRole::Vector);
        graph.weight(Weight::new(name, shape, dtype, role))
    };
    let (norm, bias) = (vector("norm", 32), vector("bias", 32));
    let norm = NormSpec::new(norm, 1e-5, 32);
    let part = |weight| LinearPart::new(weight);

    let mut x = graph.embed(table, "x");
    let angles = graph.rope_angles(RopeFrequencies::new(vec![1.0; 8]), "angles");
    for layer in 0..layers {
        graph.set_layer(Some(u32::try_from(layer).unwrap()));
        let name = |name: &str| format!("{name}.{layer}");
        let h = graph.rms_norm(x, norm, &name("h"));
        let q = graph.linear(h, LinearPart::new(q).with_bias(Some(bias)), &name("q"));
        let (k, v) = (graph.linear(h, part(k), &name("k")), graph.linear(h, part(v), &name("v")));
        let q = graph.rope(q, angles, 16, RopeStyle::Half, &name("q_rot"));
        let k = graph.rope(k, angles, 16, RopeStyle::Half, &name("k_rot"));
        let stored = graph.kv_write(k, v, layer, &name("kv"));
        let window = window.filter(|_| layer + 1 == layers);
        let shape = AttentionShape::new(layer, 2, 1, 16).with_scale(0.25).with_window(window);
        let a = graph.attention(q, stored, shape, &name("a"));
        let o = graph.linear(a, part(o), &name("o"));
        let mid = graph.add(x, o, &name("mid"));
        let h = graph.rms_norm(mid, norm, &name("mlp_in"));
        let (gate, up) = (graph.linear(h, part(gate), &name("gate")), graph.linear(h, part(up), &name("up")));
        let act = graph.activation(gate, ActivationKind::Silu, &name("act"));
        let product = graph.mul(act, up, &name("product"));
        let down = graph.linear(product, part(down), &name("down"));
        x = graph.add(mid, down, &name("out"));
    }
    graph.set_layer(None);
    let wanted = graph.gather_rows(x, "wanted");
    let last = graph.rms_norm(wanted, norm, "last");
    let logits = graph.linear(last, part(table), "logits");
    graph.finish(x, logits)
}

/// Returns a cost without integer operations.
fn cost(flops: u64, weight_bytes: u64, activation_bytes: u64, kv_bytes: u64) -> Cost {
    Cost::default()
        .with_flops(flops)
        .with_int8_flops(0)
        .with_weight_bytes(weight_bytes)
        .with_activation_bytes(activation_bytes)
        .with_kv_bytes(kv_bytes)
}

/// Three rows of a sequence of 5 tokens, with f16 keys and values and one logit row.
///
/// A row of 32 floats has 128 bytes, a `q8_0` block of 32 elements has 34.
#[test]
fn steps_cost_what_one_counts_by_hand() {
    let shape = CostShape::from_batch(&[3], &[5], 1, None, 2);
    assert_eq!(
        shape,
        CostShape::default()
            .with_tokens(3)
            .with_logit_rows(1)
            .with_seqs(1)
            .with_attended_tokens(3 + 4 + 5)
            .with_kv_tokens(5)
            .with_kv_element_bytes(2)
    );
    let plan = plan(&small_graph(1, None), Numerics::Exact, 0);
    let expected = [
        ("embed", cost(0, 3 * 64, 3 * 4 + 3 * 128, 0)),
        ("rope_angles", cost(3 * 8 * 3, 0, 3 * 4 + 3 * 64, 0)),
        ("rms_norm", cost(3 * 32 * 4, 128, 3 * 256, 0)),
        ("linear", cost(3 * (2 * 32 * 32 + 32), 4 * 32 * 32 + 128, 3 * 256, 0)),
        ("linear", cost(3 * 2 * 16 * 32, 4 * 16 * 32, 3 * (128 + 64), 0)),
        ("linear", cost(3 * 2 * 16 * 32, 4 * 16 * 32, 3 * (128 + 64), 0)),
        ("rope", cost(3 * 2 * 8 * 6, 0, 3 * (128 + 64 + 128), 0)),
        ("rope", cost(3 * 8 * 6, 0, 3 * (64 + 64 + 64), 0)),
        ("kv_write", cost(0, 0, 3 * 128, 3 * 2 * 16 * 2)),
        ("attention", cost(12 * 4 * 2 * 16, 0, 3 * 256, 5 * 2 * 16 * 2)),
        ("linear", cost(3 * 2 * 32 * 32, 4 * 32 * 32, 3 * 256, 0)),
        ("add", cost(3 * 32, 0, 3 * 3 * 128, 0)),
        ("rms_norm", cost(3 * 32 * 4, 128, 3 * 256, 0)),
        ("linear", cost(3 * 2 * 64 * 32, 64 * 34, 3 * (128 + 256), 0)),
        ("linear", cost(3 * 2 * 64 * 32, 64 * 34, 3 * (128 + 256), 0)),
        ("activation", cost(3 * 64 * 4, 0, 3 * 512, 0)),
        ("mul", cost(3 * 64, 0, 3 * 768, 0)),
        ("linear", cost(3 * 2 * 64 * 32, 32 * 2 * 34, 3 * (128 + 256), 0)),
        ("add", cost(3 * 32, 0, 3 * 3 * 128, 0)),
        ("gather_rows", cost(0, 0, 4 + 256, 0)),
        ("rms_norm", cost(32 * 4, 128, 256, 0)),
        ("linear", cost(2 * 10 * 32, 2 * 10 * 32, 128 + 40, 0)),
        ("arg_max", cost(0, 0, 40 + 4, 0)),
        ("row_status", cost(0, 0, 3 * 128 + 4 + 3, 0)),
    ];
    let costs = plan.step_costs(&shape);
    let got: Vec<_> = plan.steps.iter().map(|step| step.op.name()).zip(costs.iter().copied()).collect();
    assert_eq!(got, expected);

    let total = plan.cost(&shape);
    assert_eq!(total, costs.iter().copied().sum());
    assert_eq!(total.bytes(), total.weight_bytes + total.activation_bytes + total.kv_bytes);
    assert_eq!(total.intensity(), total.flops as f64 / total.bytes() as f64);
    let by_op = plan.costs_by_op(&costs);
    assert_eq!(by_op.iter().map(|op| op.cost).sum::<Cost>(), total);
    assert_eq!(by_op.iter().map(|op| op.launches as usize).sum::<usize>(), plan.steps.len());
    let linear = by_op.iter().find(|op| op.op == "linear").unwrap();
    assert_eq!((linear.launches, linear.cost.weight_bytes), (8, 4 * 96 * 32 + 128 + 192 * 34 + 640));
}

/// A scale costs one operation per element for any factor, and reads and writes the rows.
#[test]
fn a_scale_costs_one_operation_an_element() {
    let mut graph = GraphBuilder::new();
    let (shape, dtype, role) = (vec![10, 32], DType::F32, WeightRole::Matrix);
    let table = graph.weight(Weight::new("table", shape, dtype, role));
    let x = graph.embed(table, "x");
    let x = graph.scale(x, 12.0, "x_scaled");
    let wanted = graph.gather_rows(x, "wanted");
    let wanted = graph.scale(wanted, 0.125, "wanted_scaled");
    let logits = graph.linear(wanted, LinearPart::new(table), "logits");
    let graph = graph.finish(x, logits);
    assert!(graph.dump().contains("wanted_scaled[logit_rows,32]f32 = scale<0.125>(wanted)"), "{}", graph.dump());
    let plan = plan(&graph, Numerics::Exact, 3);
    let costs = plan.step_costs(&CostShape::from_batch(&[3], &[5], 1, None, 2));
    let scales = plan.steps.iter().zip(costs).filter(|(step, _)| step.op.name() == "scale").map(|(_, cost)| cost);
    assert_eq!(scales.collect::<Vec<_>>(), [cost(3 * 32, 0, 3 * 256, 0), cost(32, 0, 256, 0)]);
}

#[test]
fn fused_steps_cost_the_same_work_and_move_less() {
    let shape = CostShape::from_batch(&[3], &[5], 1, None, 2);
    let costs = |fusion| {
        let plan = plan(&small_graph(1, None), Numerics::Exact, fusion);
        plan.costs_by_op(&plan.step_costs(&shape))
    };
    let of = |costs: &[ascend_llm::graph::OpCost], op: &str| costs.iter().find(|c| c.op == op).unwrap().cost;
    let (one, two) = (costs(1), costs(2));
    assert_eq!(of(&one, "act_mul"), cost(3 * 64 * 5, 0, 3 * 768, 0));
    assert_eq!(of(&one, "add_rms_norm"), cost(3 * 32 * 5, 128, 3 * 4 * 128, 0));
    assert_eq!(of(&one, "rope_kv_write"), cost(3 * 8 * 6, 0, 3 * 3 * 64, 3 * 2 * 16 * 2));
    // The product is written to scratch and read from it once.
    let down = cost(3 * (64 * 5 + 2 * 64 * 32), 32 * 2 * 34, 3 * (512 + 2 * 256 + 128), 0);
    assert_eq!(of(&two, "swiglu_linear"), down);
}

/// Two layers and three rows, with int8 products for the three matrices of the MLP.
#[test]
fn integer_operations_are_counted_apart() {
    let shape = CostShape::from_batch(&[3], &[5], 1, None, 2);
    let attention = 6240 + 2 * 3 * 2 * 16 * 32 + 3 * 3 * 8 * 6 + 12 * 4 * 2 * 16 + 3 * 2 * 32 * 32;
    let (gate_up, down) = (2 * 3 * 2 * 64 * 32, 3 * 2 * 32 * 64);
    // Two norms, two sums, the activation function and its product.
    let rows = 2 * 3 * 32 * 4 + 2 * 3 * 32 + 3 * 64 * 5;
    // Quantization of the rows that enter the MLP, and of those between its matrices.
    let rounding = 3 * 32 * 3 + 3 * 64 * 3;
    let (angles, head) = (3 * 8 * 3, 32 * 4 + 2 * 10 * 32);
    for fusion in 0..=CompileOptions::MAX_FUSION {
        let graph = small_graph(2, None);
        let exact = plan(&graph, Numerics::Exact, fusion).cost(&shape);
        assert_eq!(exact.flops, angles + 2 * (attention + gate_up + down + rows) + head, "level {fusion}");
        assert_eq!(exact.int8_flops, 0, "level {fusion}");

        let fast = plan(&graph, Numerics::Fast, fusion).cost(&shape);
        assert_eq!(fast.flops, exact.flops + 2 * rounding, "level {fusion}");
        assert_eq!(fast.int8_flops, 2 * (gate_up + down), "level {fusion}");
    }
    assert_eq!(2 * (gate_up + down), 73_728);
}

const BATCHES: [(&[u32], &[u32], u64); 5] =
    [(&[1], &[1], 1), (&[1], &[100], 1), (&[64], &[64], 1), (&[1, 1, 30, 7], &[90, 1, 30, 50], 3), (&[20], &[40], 0)];

#[test]
fn fusion_keeps_operations_weights_and_keys_and_never_moves_more() {
    for model in MODELS {
        let graph = graph(model);
        for numerics in [Numerics::Exact, Numerics::Fast] {
            let plans: Vec<Plan> =
                (0..=CompileOptions::MAX_FUSION).map(|fusion| plan(&graph, numerics, fusion)).collect();
            for (q_lens, kv_lens, logit_rows) in BATCHES {
                let costs: Vec<Cost> = plans
                    .iter()
                    .map(|plan| plan.batch_costs(q_lens, kv_lens, logit_rows, 2).into_iter().sum())
                    .collect();
                for (level, pair) in costs.windows(2).enumerate() {
                    let (below, above) = (pair[0], pair[1]);
                    assert_eq!(below.flops, above.flops, "{model} {numerics:?} {q_lens:?} level {level}");
                    assert_eq!(below.int8_flops, above.int8_flops, "{model}");
                    assert_eq!(below.weight_bytes, above.weight_bytes, "{model}");
                    assert_eq!(below.kv_bytes, above.kv_bytes, "{model}");
                    assert!(below.activation_bytes >= above.activation_bytes, "{model} level {level}");
                }
                assert!(costs[0].activation_bytes > costs[2].activation_bytes, "{model}");
            }
        }
    }
}

/// A decode step reads each matrix of the model once, however many rows use it.
///
/// A tied embedding table is read once as a matrix, and one row per token.
#[test]
fn weights_are_read_once_a_launch() {
    for model in MODELS {
        let graph = graph(model);
        let plan = plan(&graph, Numerics::Exact, 2);
        let bytes = |weight: &Weight| {
            let row = weight.dtype.bytes_for(*weight.shape.last().unwrap()).unwrap();
            (row, row * weight.shape.iter().rev().skip(1).product::<usize>())
        };
        let uses = |id: usize| {
            plan.steps.iter().flat_map(|step| step.op.weights()).filter(|used| used.0 as usize == id).count()
        };
        // The embedding table is the first weight: one row is read per token, and the whole table only if it is tied to
        // the head.
        let (row, table) = bytes(&plan.weights[0]);
        let tied = uses(0) == 2;
        let rest: usize = plan.weights[1..].iter().map(|weight| bytes(weight).1).sum();
        assert!((1..plan.weights.len()).all(|id| uses(id) == 1), "{model}");
        for rows in [1, 5] {
            let lens = vec![1; rows];
            let total: Cost = plan.batch_costs(&lens, &lens, rows as u64, 2).into_iter().sum();
            let expected = rest + rows * row + if tied { table } else { 0 };
            assert_eq!(total.weight_bytes, expected as u64, "{model}, {rows} rows");
        }
    }
}

#[test]
fn a_batch_costs_the_sum_of_its_sequences_operations() {
    for model in MODELS {
        let plan = plan(&graph(model), Numerics::Fast, 2);
        let total = |q: &[u32], kv: &[u32], logits| plan.batch_costs(q, kv, logits, 4).into_iter().sum::<Cost>();
        let together = total(&[3, 1, 12], &[3, 70, 40], 3);
        let alone = total(&[3], &[3], 1) + total(&[1], &[70], 1) + total(&[12], &[40], 1);
        assert_eq!((together.flops, together.kv_bytes), (alone.flops, alone.kv_bytes), "{model}");
        assert!(together.weight_bytes < alone.weight_bytes, "{model}");
        // In one chunk or in several, the same rows see the same keys.
        let chunks = total(&[10], &[10], 0) + total(&[30], &[40], 1);
        assert_eq!(total(&[40], &[40], 1).flops, chunks.flops, "{model}");
    }
}

#[test]
fn windows_bound_what_attention_costs() {
    let plan = plan(&graph("conformance/mistral-sliding"), Numerics::Exact, 2);
    let window = plan.steps.iter().find_map(|step| match &step.op {
        ascend_llm::graph::Op::Attention(shape) => shape.window,
        _ => None,
    });
    let window = window.unwrap();
    let attention = |context| {
        let costs = plan.costs_by_op(&plan.step_costs(&CostShape::decode(context, 2)));
        costs.iter().find(|op| op.op == "attention").unwrap().cost
    };
    assert!(attention(window - 1).flops < attention(window).flops);
    assert_eq!(attention(window), attention(window + 1));
    assert_eq!(attention(window), attention(u32::MAX));
}

#[test]
fn empty_and_absurd_batches_are_counted_without_panic() {
    let plan = plan(&graph(MODELS[0]), Numerics::Exact, 2);
    assert_eq!(plan.cost(&CostShape::default()), Cost::default());
    assert_eq!(Cost::default().intensity(), 0.0);
    let most = u64::MAX;
    let shape = CostShape::default()
        .with_tokens(most)
        .with_logit_rows(most)
        .with_seqs(most)
        .with_attended_tokens(most)
        .with_kv_tokens(most)
        .with_kv_element_bytes(most);
    assert_eq!(plan.cost(&shape), cost(most, plan.cost(&shape).weight_bytes, most, most));
    assert!(plan.cost(&CostShape::prefill(u32::MAX, 4)).flops > 0);
}

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: proptest::test_runner::RngSeed::Fixed(20), ..ProptestConfig::default() })]

    /// Compares the closed formulas with a count of all keys that each row sees.
    #[test]
    fn seen_keys_are_counted_exactly(
        seqs in prop::collection::vec((1_u32..40, 0_u32..40), 0..5),
        window in prop::option::of(1_u32..50),
    ) {
        let q_lens: Vec<u32> = seqs.iter().map(|(q, _)| *q).collect();
        let kv_lens: Vec<u32> = seqs.iter().map(|(q, before)| q + before).collect();
        let (mut attended, mut shown) = (0, 0);
        for (q, kv) in q_lens.iter().zip(&kv_lens) {
            let sees = |row: u32, key: u32| key <= row && window.is_none_or(|window| row - key < window);
            let rows = kv - q..*kv;
            attended += rows.clone().map(|row| (0..*kv).filter(|&key| sees(row, key)).count() as u64).sum::<u64>();
            shown += (0..*kv).filter(|&key| rows.clone().any(|row| sees(row, key))).count() as u64;
        }
        prop_assert_eq!(attended_tokens(&q_lens, &kv_lens, window), attended);
        prop_assert_eq!(shown_tokens(&q_lens, &kv_lens, window), shown);

        // Without the lengths of single rows, the cost of a windowed shape is at least the exact one.
        let exact = CostShape::from_batch(&q_lens, &kv_lens, 0, window, 2);
        let bound = CostShape::from_batch(&q_lens, &kv_lens, 0, None, 2).within(window);
        prop_assert!(bound.attended_tokens >= attended && bound.kv_tokens >= shown);
        if q_lens.len() == 1 && q_lens[0] == 1 {
            prop_assert_eq!(bound, exact);
        }
    }
    /// The rates equal the plan's costs: for batches with and without logits, with more rows than the table has, and
    /// without rows.
    #[test]
    fn rates_are_the_plan_s_own_costs(
        seqs in prop::collection::vec((0_u32..40, 0_u32..300), 0..5),
        logit_rows in 0_u64..9,
        fusion in 0..=CompileOptions::MAX_FUSION,
        fast in any::<bool>(),
        window in prop::option::of(1_u32..60),
        kv_element_bytes in prop::sample::select(vec![2_u64, 4]),
        model in prop::option::of(prop::sample::select(MODELS.as_slice())),
    ) {
        let graph = model.map_or_else(|| small_graph(2, window), graph);
        let plan = plan(&graph, if fast { Numerics::Fast } else { Numerics::Exact }, fusion);
        let q_lens: Vec<u32> = seqs.iter().map(|(q, _)| *q).collect();
        let kv_lens: Vec<u32> = seqs.iter().map(|(q, before)| q + before).collect();
        let expected: Cost = plan.batch_costs(&q_lens, &kv_lens, logit_rows, kv_element_bytes).into_iter().sum();
        let rates = CostRates::new(&plan, kv_element_bytes);
        prop_assert_eq!(rates.cost(&q_lens, &kv_lens, logit_rows), expected);
    }
}
