//! Tests that plans equal their golden dumps, that fusion applies to each occurrence of a pattern, and that `check`
//! finds broken plans.
//!
//! `ASCEND_LLM_BLESS=1` rewrites the dumps.

#![allow(missing_docs, clippy::cast_possible_truncation)] // sizes here are small

use std::path::{Path, PathBuf};

use ascend_llm::graph::passes::{FusionReport, shard};
use ascend_llm::graph::{
    Bucket, CompileError, CompileOptions, Elem, Graph, Io, Numerics, Op, Operand, Plan, Precision, RowDim, Target,
    TpRank, compile,
};
use ascend_llm::model::{self, config_from_gguf, config_from_hub, decoder_graph};
use ascend_llm::weights::{DType, ModelKind, TensorView, WeightSource};

const TARGET: Target = Target::new(128);
const BUCKET: Bucket = Bucket { tokens: 64, logit_rows: 8, seqs: 8, kv_tokens: 256 };

/// Short name, path in `tests/data`, number of layers, whether weights are quantized, whether the model has head norms.
const MODELS: [(&str, &str, u32, bool, bool); 3] = [
    ("llama-gqa-tied", "conformance/llama-gqa-tied", 2, false, false),
    ("qwen3", "conformance/qwen3", 2, false, true),
    ("fable-q8_0", "fable/gguf/fable-q8_0.gguf", 3, true, false),
];

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn graph(path: &str) -> Graph {
    let files = model::open(data(path)).unwrap();
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

fn every_plan() -> Vec<Plan> {
    let mut plans = Vec::new();
    for (_, path, ..) in MODELS {
        let graph = graph(path);
        for numerics in [Numerics::Exact, Numerics::Fast] {
            plans.extend((0..=CompileOptions::MAX_FUSION).map(|fusion| plan(&graph, numerics, fusion)));
        }
    }
    plans
}

#[test]
fn dumps_are_golden() {
    for (name, path, _, quantized, _) in MODELS {
        let graph = graph(path);
        let multi_stream = compile(&graph, TARGET, Numerics::Fast, &CompileOptions::preset(3), BUCKET).unwrap();
        golden(&format!("{name}-lanes"), &multi_stream);
        for fusion in 0..=CompileOptions::MAX_FUSION {
            let exact = plan(&graph, Numerics::Exact, fusion);
            let fast = plan(&graph, Numerics::Fast, fusion);
            if quantized {
                assert_ne!(exact, fast, "{name}: integer weights must use int8 activations");
            } else {
                assert_eq!(exact, fast, "{name}: float weights must keep f32 activations");
            }
            for (numerics, plan) in [("exact", exact), ("fast", fast)] {
                if !quantized && numerics == "fast" {
                    continue;
                }
                golden(&format!("{name}-fusion{fusion}-{numerics}"), &plan);
            }
        }
    }
    let graph = graph(MODELS[0].1);
    for index in 0..2 {
        let part = shard(&graph, TpRank { index, of: 2 }).unwrap();
        golden(&format!("{}-rank{index}", MODELS[0].0), &plan(&part, Numerics::Exact, 2));
    }
    let mut options = CompileOptions::default();
    options.precision = Some(Precision::BF16);
    options.precision_overrides.insert("lm_head".to_owned(), Precision::F32);
    options.precision_overrides.insert("down_proj".to_owned(), Precision::F16);
    let rounded = compile(&graph, TARGET, Numerics::Fast, &options, BUCKET).unwrap();
    golden(&format!("{}-bf16", MODELS[0].0), &rounded);
}

/// Compares a plan with its dump in `tests/data/plans`, or writes the dump.
fn golden(name: &str, plan: &Plan) {
    let file = data("plans").join(format!("{name}.txt"));
    if std::env::var_os("ASCEND_LLM_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(&file, plan.dump()).unwrap();
    }
    let golden = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(golden == plan.dump(), "the plan differs from {}; the new dump is\n{}", file.display(), plan.dump());
}

#[test]
fn compiling_is_pure() {
    assert_eq!(every_plan(), every_plan());
}

#[test]
fn launches_fall_from_level_to_level() {
    for plans in every_plan().chunks(4) {
        let steps: Vec<usize> = plans.iter().map(|plan| plan.steps.len()).collect();
        assert_eq!(steps.len(), 4);
        assert!(steps.windows(2).all(|pair| pair[0] > pair[1]), "{steps:?}");
    }
}

#[test]
fn every_rule_fires_as_often_as_the_model_has_its_pattern() {
    for (name, path, layers, quantized, head_norms) in MODELS {
        let graph = graph(path);
        for numerics in [Numerics::Exact, Numerics::Fast] {
            let none = FusionReport::default();
            let mut one = none.clone();
            one.add_rms_norm = layers;
            one.qk_norm_rope = if head_norms { 2 * layers } else { 0 };
            one.rope_kv_write = layers;
            one.act_mul = layers;
            let mut two = one.clone();
            two.linear_multi = 2 * layers;
            two.swiglu_linear = layers;
            // Both norms of each layer and the final norm, if int8 products read their results.
            two.norm_cast = if quantized && numerics == Numerics::Fast { 2 * layers + 1 } else { 0 };
            let mut three = two.clone();
            // The last layer's sum is gathered before it is normalized.
            three.add_rms_norm_across = layers - 1;
            three.linear_arg_max = 1;
            three.attention_schedules = layers;
            for (fusion, expected) in [(0, none), (1, one), (2, two), (3, three)] {
                assert_eq!(plan(&graph, numerics, fusion).fused, expected, "{name}, {numerics:?}, fusion {fusion}");
            }
        }
    }
}

/// The multiset of weights, constants and layers in a plan stays the same: fusion neither loses nor adds any.
#[test]
fn fusion_keeps_every_weight_use() {
    for plans in every_plan().chunks(4) {
        let uses = |plan: &Plan| {
            let mut uses: Vec<_> = plan.steps.iter().flat_map(|step| step.op.weights()).collect();
            uses.sort_unstable();
            uses
        };
        for fused in &plans[1..] {
            assert_eq!(uses(&plans[0]), uses(fused));
        }
    }
}

#[test]
fn arenas_are_close_to_their_bound() {
    for plan in every_plan() {
        let (arena, bound) = (plan.arena_bytes, plan.arena_bound_bytes);
        assert!(
            bound > 0 && bound <= arena && arena * 10 <= bound * 13,
            "the arena has {arena} bytes, the lower bound is {bound}"
        );
    }
}

/// Without memory reuse, no two values share a byte; all else stays the same, and `check` verifies the offsets.
#[test]
fn without_memory_reuse_no_two_values_share_a_byte() {
    let mut options = CompileOptions::default();
    options.memory_reuse = Some(false);
    for (_, path, ..) in MODELS {
        let graph = graph(path);
        for fusion in 0..=CompileOptions::MAX_FUSION {
            options.fusion = Some(fusion);
            let apart = compile(&graph, TARGET, Numerics::Fast, &options, BUCKET).unwrap();
            let mut ranges: Vec<(usize, usize)> = Vec::new();
            for value in &apart.values {
                if let Operand::Arena { offset } = value.operand {
                    ranges.push((offset, offset + value.bytes(&BUCKET)));
                }
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
            let sum: usize = ranges.iter().map(|(start, end)| (end - start).next_multiple_of(TARGET.alignment)).sum();
            assert_eq!(apart.arena_bytes, sum);

            let shared = plan(&graph, Numerics::Fast, fusion);
            assert!(shared.arena_bytes < sum && shared.arena_bound_bytes == apart.arena_bound_bytes);
            let what = |plan: &Plan| -> Vec<_> {
                plan.steps.iter().map(|s| (s.op.clone(), s.inputs.clone(), s.outputs.clone(), s.scratch)).collect()
            };
            assert_eq!(what(&shared), what(&apart));
            assert!(apart.dump().starts_with(&format!("plan fusion={fusion} reuse=off ")), "{}", apart.dump());
            let reason = refused(&shared, "reuse", |plan| plan.memory_reuse = false);
            assert!(reason.contains("overlap"), "{reason}");
        }
    }
}

/// Tensors with shapes but without data, sufficient to compile a model.
#[derive(Debug)]
struct Shapes(std::collections::BTreeMap<String, Vec<usize>>);

impl WeightSource for Shapes {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.0.get(name).map(|shape| TensorView::new(DType::F16, shape, &[]))
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

/// Graph of LLaMA-7B at 2,048 tokens, built without weights.
fn seven_billion() -> Graph {
    let config = config_from_hub(
        br#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "rope_theta": 10000.0, "tie_word_embeddings": false}"#,
    )
    .unwrap();
    let mut shapes = std::collections::BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| drop(shapes.insert(name, shape.to_vec()));
    for name in ["model.embed_tokens", "lm_head"] {
        add(format!("{name}.weight"), &[32000, 4096]);
    }
    add("model.norm.weight".to_owned(), &[4096]);
    for layer in 0..32 {
        let prefix = format!("model.layers.{layer}");
        for name in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("{prefix}.{name}.weight"), &[4096]);
        }
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            add(format!("{prefix}.self_attn.{name}.weight"), &[4096, 4096]);
        }
        for name in ["gate_proj", "up_proj"] {
            add(format!("{prefix}.mlp.{name}.weight"), &[11008, 4096]);
        }
        add(format!("{prefix}.mlp.down_proj.weight"), &[4096, 11008]);
    }
    decoder_graph(&config, &Shapes(shapes)).unwrap()
}

#[test]
fn a_model_of_seven_billion_parameters_reuses_95_percent_of_its_arena() {
    let graph = seven_billion();
    let bucket = Bucket { tokens: 2048, logit_rows: 8, seqs: 8, kv_tokens: 2048 };
    for level in 0..=CompileOptions::MAX_FUSION {
        let [shared, apart, multi_stream] = [(true, 1), (false, 1), (true, 4)].map(|(memory_reuse, parallel_ops)| {
            let mut options = CompileOptions::default();
            (options.fusion, options.memory_reuse) = (Some(level), Some(memory_reuse));
            options.parallel_ops = Some(parallel_ops);
            compile(&graph, TARGET, Numerics::Fast, &options, bucket).unwrap()
        });
        let bytes = [shared.arena_bytes, shared.arena_bound_bytes, apart.arena_bytes, multi_stream.arena_bytes];
        println!("level {level}: arena, bound, without reuse, on four streams: {bytes:?}");
        assert!(20 * shared.arena_bytes <= apart.arena_bytes, "level {level}: {bytes:?}");
        assert!(10 * shared.arena_bytes <= 13 * shared.arena_bound_bytes, "level {level}: {bytes:?}");
        // Values of steps that run in parallel are live at the same time.
        assert!(
            multi_stream.arena_bytes >= shared.arena_bytes && 20 * multi_stream.arena_bytes <= apart.arena_bytes,
            "{bytes:?}"
        );
    }
}

#[test]
fn sound_plans_pass() {
    for plan in every_plan() {
        plan.check().unwrap();
    }
}

/// Returns the reason why `check` rejects the plan after `change`.
fn refused(plan: &Plan, what: &str, change: impl FnOnce(&mut Plan)) -> String {
    let mut broken = plan.clone();
    change(&mut broken);
    assert_ne!(&broken, plan, "{what}: the change has not changed the plan");
    match broken.check() {
        Err(CompileError::Invalid(reason)) => reason,
        other => panic!("{what}: {other:?}"),
    }
}

fn step_of(plan: &Plan, name: &str) -> usize {
    plan.steps.iter().position(|step| step.op.name() == name).unwrap_or_else(|| panic!("{name} is not in the plan"))
}

fn is_arena(plan: &Plan, value: usize) -> bool {
    matches!(plan.values[value].operand, Operand::Arena { .. })
}

#[test]
fn any_wait_that_is_taken_away_is_missed() {
    for plan in multi_stream_plans() {
        let mut waits = 0;
        for at in 0..plan.steps.len() {
            for wait in 0..plan.steps[at].waits_on.len() {
                waits += 1;
                let reason = refused(&plan, "a wait", |plan| _ = plan.steps[at].waits_on.remove(wait));
                assert!(reason.contains("does not wait") || reason.contains("overlap"), "{reason}");
            }
        }
        assert!(waits > 0);
    }
}

#[test]
fn steps_on_missing_streams_and_waits_for_later_steps_are_found() {
    for plan in multi_stream_plans() {
        refused(&plan, "a stream", |plan| plan.steps[1].stream = plan.streams);
        refused(&plan, "a wait for itself", |plan| plan.steps[3].waits_on.push(3));
        refused(&plan, "a wait for nothing", |plan| plan.steps[3].waits_on.push(usize::MAX));
    }
}

/// Plans with four streams, at all fusion levels.
fn multi_stream_plans() -> Vec<Plan> {
    let mut options = CompileOptions::default();
    options.parallel_ops = Some(4);
    let mut plans = Vec::new();
    for (_, path, ..) in MODELS {
        for fusion in 0..=CompileOptions::MAX_FUSION {
            options.fusion = Some(fusion);
            plans.push(compile(&graph(path), TARGET, Numerics::Fast, &options, BUCKET).unwrap());
        }
    }
    plans
}

/// Streams shorten the critical path of a plan and change nothing else.
///
/// Steps that run in parallel share no byte that one of them writes.
#[test]
fn streams_group_steps_and_keep_them_apart() {
    for (multi_stream, single) in multi_stream_plans().iter().zip(fast_plans()) {
        let groups = multi_stream.groups();
        assert_eq!(single.groups().len(), single.steps.len());
        assert!(
            groups.len() < multi_stream.steps.len(),
            "{} groups of {} steps",
            groups.len(),
            multi_stream.steps.len()
        );
        assert!(groups.iter().all(|group| group.len() <= 4), "{groups:?}");
        let what = |plan: &Plan| -> Vec<_> {
            plan.steps.iter().map(|s| (s.op.clone(), s.inputs.clone(), s.outputs.clone(), s.scratch)).collect()
        };
        assert_eq!(what(multi_stream), what(&single));
        for group in groups {
            let span = |v: &usize| match multi_stream.values[*v].operand {
                Operand::Arena { offset } => Some(offset..offset + multi_stream.values[*v].bytes(&BUCKET)),
                _ => None,
            };
            for a in group.clone() {
                for b in group.clone().filter(|b| *b != a) {
                    let (a, b) = (&multi_stream.steps[a], &multi_stream.steps[b]);
                    for written in a.outputs.iter().chain(&a.scratch).filter_map(span) {
                        for touched in b.inputs.iter().chain(&b.outputs).chain(&b.scratch).filter_map(span) {
                            assert!(
                                written.end <= touched.start || touched.end <= written.start,
                                "{}",
                                multi_stream.dump()
                            );
                        }
                    }
                }
            }
        }
    }
}

fn fast_plans() -> Vec<Plan> {
    let levels = 0..=CompileOptions::MAX_FUSION;
    MODELS
        .iter()
        .flat_map(|(_, path, ..)| levels.clone().map(|level| plan(&graph(path), Numerics::Fast, level)))
        .collect()
}

#[test]
fn values_moved_onto_each_other_are_found() {
    for plan in every_plan() {
        for step in &plan.steps {
            let (Some(&input), Some(&output)) = (step.inputs.first(), step.outputs.first()) else { continue };
            if is_arena(&plan, input) && is_arena(&plan, output) {
                let reason = refused(&plan, "overlap", |plan| {
                    plan.values[output].operand = plan.values[input].operand;
                    plan.arena_bytes *= 2;
                });
                assert!(reason.contains("overlap"), "{reason}");
            }
        }
    }
}

#[test]
fn values_out_of_the_arena_or_unaligned_are_found() {
    let plan = plan(&graph(MODELS[2].1), Numerics::Fast, 2);
    refused(&plan, "a smaller arena", |plan| plan.arena_bytes -= 1);
    for value in (0..plan.values.len()).filter(|&value| is_arena(&plan, value)) {
        for offset in [plan.arena_bytes, usize::MAX - 127, usize::MAX / 2 + 1] {
            refused(&plan, "out of the arena", |plan| plan.values[value].operand = Operand::Arena { offset });
        }
        refused(&plan, "unaligned", |plan| {
            if let Operand::Arena { offset } = &mut plan.values[value].operand {
                *offset += 64;
            }
        });
    }
    for alignment in [0, 1, 32, 96] {
        refused(&plan, "alignment", |plan| plan.alignment = alignment);
    }
}

#[test]
fn reads_before_writes_and_second_writes_are_found() {
    for plan in every_plan() {
        for at in 0..plan.steps.len() - 1 {
            let (step, next) = (&plan.steps[at], &plan.steps[at + 1]);
            if step.outputs.iter().any(|written| next.inputs.contains(written)) {
                let reason = refused(&plan, "steps swapped", |plan| plan.steps.swap(at, at + 1));
                assert!(reason.contains("before it is written"), "{reason}");
            }
        }
        for at in 0..plan.steps.len() {
            if !plan.steps[at].outputs.is_empty() {
                refused(&plan, "a step left out", |plan| drop(plan.steps.remove(at)));
                let reason = refused(&plan, "a step twice", |plan| plan.steps.insert(at, plan.steps[at].clone()));
                let ends = plan.steps[at].op.name().ends_with("arg_max");
                assert!(ends || reason.contains("a second time"), "{reason}");
            }
        }
    }
}

/// Each change creates an operand that its operation does not support.
#[test]
fn operands_that_do_not_fit_are_found() {
    for plan in every_plan() {
        let count = plan.values.len();
        for at in 0..plan.steps.len() {
            refused(&plan, "an unknown value", |plan| plan.steps[at].inputs.push(count));
            refused(&plan, "an input too many", |plan| plan.steps[at].inputs.push(0));
            refused(&plan, "an output too many", |plan| plan.steps[at].outputs.push(0));
            refused(&plan, "scratch", |plan| {
                let step = &mut plan.steps[at];
                step.scratch = if step.scratch.is_some() { None } else { Some(0) };
            });
            if !plan.steps[at].inputs.is_empty() {
                refused(&plan, "an input too few", |plan| {
                    plan.steps[at].inputs.pop();
                });
            }
            if !plan.steps[at].outputs.is_empty() {
                refused(&plan, "an output too few", |plan| {
                    plan.steps[at].outputs.pop();
                });
            }
        }
        let touched: Vec<usize> = (0..count)
            .filter(|v| plan.steps.iter().any(|s| s.inputs.iter().chain(&s.outputs).chain(&s.scratch).any(|o| o == v)))
            .collect();
        assert_eq!(touched.len(), count, "no step uses one of the values");
        for &value in &touched {
            refused(&plan, "columns", |plan| plan.values[value].cols += 1);
            refused(&plan, "huge columns", |plan| plan.values[value].cols = usize::MAX);
            refused(&plan, "rows", |plan| {
                let rows = &mut plan.values[value].rows;
                *rows = if *rows == RowDim::Tokens { RowDim::LogitRows } else { RowDim::Tokens };
            });
            for elem in [Elem::F32, Elem::Q8, Elem::Effect] {
                if plan.values[value].elem != elem {
                    refused(&plan, "element type", |plan| plan.values[value].elem = elem);
                }
            }
            for operand in [
                Operand::Arena { offset: 0 },
                Operand::Effect,
                Operand::Io(Io::Logits),
                Operand::Io(Io::KvPool),
                Operand::Io(Io::TokenIds),
            ] {
                let was = plan.values[value].operand;
                // Another offset in the arena is a case of the overlap test.
                if std::mem::discriminant(&was) != std::mem::discriminant(&operand) {
                    refused(&plan, "place", |plan| plan.values[value].operand = operand);
                }
            }
        }
        refused(&plan, "a huge bucket", |plan| plan.bucket.tokens = usize::MAX);
        refused(&plan, "huge sequences", |plan| plan.bucket.kv_tokens = 1 << 32);
        refused(&plan, "many sequences", |plan| plan.bucket.seqs = usize::MAX);
        refused(&plan, "a vocabulary", |plan| plan.vocab_size += 1);
        refused(&plan, "rotary tables", |plan| plan.ropes.clear());
        refused(&plan, "no status", |plan| drop(plan.steps.pop()));
    }
}

#[test]
fn weights_that_do_not_fit_are_found() {
    for plan in every_plan() {
        for weight in 0..plan.weights.len() {
            refused(&plan, "shape", |plan| plan.weights[weight].shape[0] += 1);
            refused(&plan, "dimensions", |plan| plan.weights[weight].shape.push(1));
            refused(&plan, "too few weights", |plan| plan.weights.truncate(weight));
        }
    }
}

#[test]
fn constants_that_do_not_fit_are_found() {
    let qwen = graph(MODELS[1].1);
    let (plain, fused) = (plan(&qwen, Numerics::Exact, 0), plan(&qwen, Numerics::Exact, 2));
    let (attention, kv_write) = (step_of(&plain, "attention"), step_of(&plain, "kv_write"));
    let attend = |plan: &mut Plan, change: &dyn Fn(&mut ascend_llm::graph::AttentionShape)| {
        if let Op::Attention(shape) = &mut plan.steps[attention].op {
            change(shape);
        }
    };
    refused(&plain, "heads", |plan| attend(plan, &|shape| shape.heads += 1));
    refused(&plain, "no heads", |plan| attend(plan, &|shape| shape.heads = 0));
    refused(&plain, "KV heads", |plan| attend(plan, &|shape| shape.kv_heads = 3));
    refused(&plain, "no KV heads", |plan| attend(plan, &|shape| shape.kv_heads = 0));
    refused(&plain, "head width", |plan| attend(plan, &|shape| shape.head_dim = usize::MAX));
    refused(&plain, "window", |plan| attend(plan, &|shape| shape.window = Some(0)));
    refused(&plain, "layer read", |plan| attend(plan, &|shape| shape.layer = 1));
    refused(&plain, "layer written", |plan| plan.steps[kv_write].op = Op::KvWrite { layer: 1 });
    for head_dim in [0, 7, 30, usize::MAX] {
        for (plan, name) in [(&plain, "rope"), (&fused, "qk_norm_rope"), (&fused, "rope_kv_write")] {
            let at = step_of(plan, name);
            refused(plan, name, |plan| match &mut plan.steps[at].op {
                Op::Rope { head_dim: d, .. }
                | Op::QkNormRope { head_dim: d, .. }
                | Op::RopeKvWrite { head_dim: d, .. } => {
                    *d = head_dim;
                }
                other => panic!("{other}"),
            });
        }
    }
    for group in [0, 7, 64] {
        let at = step_of(&plain, "rms_norm");
        refused(&plain, "group", |plan| {
            if let Op::RmsNorm(norm) = &mut plan.steps[at].op {
                norm.group = group;
            }
        });
    }
    let at = step_of(&fused, "linear_multi");
    refused(&fused, "parts", |plan| {
        if let Op::LinearMulti(parts) = &mut plan.steps[at].op {
            parts.pop();
        }
    });
}

/// int8 rows can only be multiplied by integer weights.
#[test]
fn int8_rows_for_float_weights_are_found() {
    let plan = plan(&graph(MODELS[2].1), Numerics::Fast, 2);
    for weight in 0..plan.weights.len() {
        if plan.weights[weight].shape.len() == 2 {
            refused(&plan, "type", |plan| plan.weights[weight].dtype = DType::F16);
        }
    }
}

#[test]
fn what_cannot_be_compiled_is_refused() {
    let graph = graph(MODELS[0].1);
    let mut options = CompileOptions::default();
    options.fusion = Some(4);
    let error = compile(&graph, TARGET, Numerics::Exact, &options, BUCKET).unwrap_err();
    assert!(matches!(error, CompileError::Option { option: "fusion", .. }), "{error}");
    options.fusion = Some(2);
    for alignment in [0, 32, 100] {
        let mut target = TARGET;
        target.alignment = alignment;
        assert!(compile(&graph, target, Numerics::Exact, &options, BUCKET).is_err(), "alignment {alignment}");
    }
    for tokens in [usize::MAX, 1 << 60, 1 << 45] {
        let bucket = Bucket { tokens, ..BUCKET };
        let error = compile(&graph, TARGET, Numerics::Exact, &options, bucket).unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
    }
    for bucket in [Bucket { seqs: usize::MAX, ..BUCKET }, Bucket { kv_tokens: 1 << 32, ..BUCKET }] {
        assert!(compile(&graph, TARGET, Numerics::Exact, &options, bucket).is_err(), "{bucket:?}");
    }
    // A device without integer kernels keeps f32 activations.
    let quantized = self::graph(MODELS[2].1);
    let mut target = TARGET;
    target.int8_activations = false;
    let fast = compile(&quantized, target, Numerics::Fast, &options, BUCKET).unwrap();
    assert_eq!(fast, plan(&quantized, Numerics::Exact, 2));
}
