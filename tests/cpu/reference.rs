//! Tests that the CPU device computes the same results as the reference interpreter.
//!
//! The tests run single operations (a fused one against its parts) and whole models, on the plain and the fastest
//! instruction set.

#![allow(missing_docs, clippy::cast_possible_truncation)] // sizes here are small

#[allow(dead_code)] // this test uses only a part
#[cfg(feature = "ascend")]
use crate::common::sim_npu;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::goldens::conformance_models;
use crate::common::model::{Model, small_config};
use ascend_llm::device::cpu::reference::model::ReferenceModel;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, Isa};
use ascend_llm::device::{Bindings, BufferId, Device, LaunchArgs, LaunchShape, MemKind, Span};
use ascend_llm::engine::Engine;
use ascend_llm::graph::passes::{OpSet, PrecisionPolicy, apply_precision, fuse};
use ascend_llm::graph::{
    ActivationKind, ActivationType, AttentionSchedules, AttentionShape, Bucket, CompileOptions, CustomCall, CustomOp,
    CustomOpError, CustomSite, Elem, Graph, LinearPart, Node, NormSpec, Numerics, Op, Precision, RegisteredOp,
    RopeFrequencies, RopeStyle, RowDim, RowStatus, Target, Value, ValueId, Weight, WeightId, WeightRole, compile,
};
use ascend_llm::kv_cache::{KvDType, KvGeometry};
use ascend_llm::model::{self, AttentionConfig, config_from_gguf, config_from_hub, decoder_graph};
use ascend_llm::weights::{self, DType, MemorySource, ModelKind, WeightSource};

/// Single operations: sums of up to 200 f32 products in another order, relative to 1 + the largest value.
const OP_BOUND: f32 = 2e-6;
/// Additional error of the Ascend device: inputs, weights and results are f16, and some cases run several operations.
#[cfg(feature = "ascend")]
const ASCEND_ROUNDING: f32 = 5e-3;
/// Whole models in exact numerics: some tens of operations in sequence, relative to 1 + the largest value.
const MODEL_BOUND: f32 = 1e-5;
/// Whole models in fast numerics: a difference in the last bit may round an activation to the next of its 127 steps.
const FAST_BOUND: f32 = 1e-2;
/// f32 activations with int8 keys and values: an element near a tie may move by a whole step if its last bit differs.
const INT8_KV_BOUND: f32 = 1e-3;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// Device on which the cases run.
struct Machine {
    label: String,
    device: Arc<dyn Device>,
    numerics: Numerics,
    kv_dtype: KvDType,
    block_size: usize,
    /// Additional rounding error of the device, added to the bound of a case.
    rounding: f32,
}

fn machines() -> Vec<Machine> {
    let machine = |device: Arc<CpuDevice>| Machine {
        label: format!("{:?}", device.isa()),
        device,
        numerics: Numerics::Exact,
        kv_dtype: KvDType::F32,
        block_size: 16,
        rounding: 0.0,
    };
    devices().into_iter().map(machine).collect()
}

fn devices() -> Vec<Arc<CpuDevice>> {
    let device = |isa| {
        let mut options = CpuOptions::default();
        (options.isa, options.threads) = (Some(isa), Some(2));
        Arc::new(CpuDevice::new(options).unwrap())
    };
    Isa::available().iter().copied().map(device).collect()
}

#[cfg(feature = "ascend")]
fn ascend() -> sim_npu::Npu {
    // Attention with blocks of 16 tokens, and with heads that are not a multiple of 64, requires a late version of
    // CANN.
    sim_npu::Npu::with(&[("cann", 90_100_000)])
}

#[cfg(feature = "ascend")]
fn ascend_machine(npu: &sim_npu::Npu) -> Machine {
    Machine {
        label: "ascend".to_owned(),
        device: npu.device(),
        numerics: Numerics::Fast,
        kv_dtype: KvDType::F16,
        block_size: 128,
        rounding: ASCEND_ROUNDING,
    }
}

/// Returns the largest difference, relative to 1 + the largest value.
fn error(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1.0f32, |most, x| most.max(1.0 + x.abs()));
    got.iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs() / largest)
        .fold(0.0, |most, e| if e > most || e.is_nan() { e } else { most })
}

// ------------------------------------------------------------------------------------------------- operations

const TOKENS: usize = 37;

/// Graph of one operation: the inputs are rows of embedding tables, the output passes through an identity matrix.
struct Case {
    graph: Graph,
    source: MemorySource,
    noise: u64,
}

impl Case {
    fn new(seed: u64) -> Self {
        Self { graph: Graph::default(), source: MemorySource::new(), noise: seed }
    }

    /// Returns numbers of magnitude about 1; equal seeds yield equal numbers.
    fn numbers(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.noise >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| 2.0 * next()).collect()
    }

    fn weight(&mut self, dtype: DType, shape: &[usize]) -> WeightId {
        let values = self.numbers(shape.iter().product());
        self.weight_of(dtype, shape, &values)
    }

    fn weight_of(&mut self, dtype: DType, shape: &[usize], values: &[f32]) -> WeightId {
        let name = format!("w{}", self.graph.weights.len());
        self.source.insert_f32(name.clone(), dtype, shape, values).unwrap();
        let role = if shape.len() == 2 { WeightRole::Matrix } else { WeightRole::Vector };
        self.graph.weights.push(Weight::new(name, shape.to_vec(), dtype, role));
        WeightId(self.graph.weights.len() as u32 - 1)
    }

    fn push(&mut self, op: Op, inputs: &[ValueId], rows: RowDim, outputs: &[(usize, Elem)]) -> Vec<ValueId> {
        if let Op::Embed { table, .. } = &op {
            self.graph.weights[table.0 as usize].role = WeightRole::Table;
        }
        let first = self.graph.values.len() as u32;
        let ids: Vec<ValueId> = (first..first + outputs.len() as u32).map(ValueId).collect();
        for (id, &(cols, elem)) in ids.iter().zip(outputs) {
            self.graph.values.push(Value::new(format!("v{}", id.0), rows, cols, elem));
        }
        self.graph.nodes.push(Node::new(op, inputs.to_vec(), ids.clone(), None));
        ids
    }

    /// Adds an operation with one f32 output, one row per token.
    fn one(&mut self, op: Op, inputs: &[ValueId], cols: usize) -> ValueId {
        self.push(op, inputs, RowDim::Tokens, &[(cols, Elem::F32)])[0]
    }

    /// Adds an input with its own table: token `i` of the launch reads row `i`.
    fn input(&mut self, cols: usize) -> ValueId {
        let table = self.weight(DType::F32, &[TOKENS, cols]);
        self.one(Op::Embed { table, first_id: 0 }, &[], cols)
    }

    fn angles(&mut self, pairs: usize) -> ValueId {
        let inv_freq = (0..pairs).map(|i| 1.0 / 100f32.powf(i as f32 / pairs as f32)).collect();
        self.graph.ropes.push(RopeFrequencies::new(inv_freq).with_attention_factor(1.25));
        let rope = self.graph.ropes.len() - 1;
        self.one(Op::RopeAngles { rope }, &[], 2 * pairs)
    }

    fn norm(&mut self, group: usize) -> NormSpec {
        NormSpec::new(self.weight(DType::F32, &[group]), 1e-5, group)
    }

    fn part(&mut self, dtype: DType, n: usize, k: usize, bias: bool) -> LinearPart {
        let weight = self.weight(dtype, &[n, k]);
        LinearPart::new(weight).with_bias(bias.then(|| self.weight(DType::F32, &[n])))
    }

    /// Makes `out` the logits of each row.
    ///
    /// int8 rows pass through an integer identity, whose 1 is 127 steps of an f16 that is nearly 1/127; bf16 rows pass
    /// through a float one. Then the requested rows are gathered, and pass through a float identity, which changes
    /// nothing.
    fn observe(&mut self, out: ValueId, fused_head: bool) {
        let Value { cols, elem, .. } = *self.graph.value(out);
        let mut identity = vec![0.0; cols * cols];
        (0..cols).for_each(|i| identity[i * cols + i] = 1.0);
        let mut x = out;
        if elem == Elem::Q8 {
            let weight = self.weight_of(DType::Q8_0, &[cols, cols], &identity);
            x = self.one(Op::Linear(LinearPart::new(weight)), &[x], cols);
        }
        if elem == Elem::BF16 {
            let weight = self.weight_of(DType::F32, &[cols, cols], &identity);
            x = self.one(Op::Linear(LinearPart::new(weight)), &[x], cols);
        }
        let weight = self.weight_of(DType::F32, &[cols, cols], &identity);
        let requested = self.push(Op::GatherRows, &[x], RowDim::LogitRows, &[(cols, Elem::F32)])[0];
        let head = LinearPart::new(weight);
        let (logits, argmax) = ((cols, Elem::F32), (1, Elem::U32));
        let argmax = if fused_head {
            self.push(Op::LinearArgMax(head), &[requested], RowDim::LogitRows, &[logits, argmax])[1]
        } else {
            let logits = self.push(Op::Linear(head), &[requested], RowDim::LogitRows, &[logits])[0];
            self.push(Op::ArgMax, &[logits], RowDim::LogitRows, &[argmax])[0]
        };
        self.graph.vocab_size = cols;
        self.push(Op::RowStatus, &[x, argmax], RowDim::LogitRows, &[]);
    }

    /// Runs the graph with `out` as logits on each machine and in the interpreter.
    ///
    /// Returns the names of the operations that ran, and the largest error.
    fn agrees(
        mut self,
        out: ValueId,
        label: &str,
        fused_head: bool,
        machines: &[Machine],
    ) -> (BTreeSet<&'static str>, f32) {
        self.observe(out, fused_head);
        let (graph, source) = (self.graph, self.source);
        let geometry = geometry_of(&graph);
        let rows: Vec<u32> = [3, 0, 36, 35, 20].into_iter().chain(4..20).collect();
        let tokens: Vec<u32> = (0..TOKENS as u32).collect();
        let expected = ReferenceModel::new(&graph, &source, geometry.dtype).unwrap().forward(&tokens, &rows);
        assert!(expected.logits.iter().any(|x| *x != 0.0) && expected.logits.iter().all(|x| x.is_finite()), "{label}");
        let bound = graph.nodes.iter().map(|node| bound_of(&node.op)).fold(OP_BOUND, f32::max);
        let mut worst = 0.0f32;
        for machine in machines {
            let (got, status) = launch(machine, &graph, &source, geometry, &tokens, &rows);
            let error = error(&got, &expected.logits);
            let (name, bound) = (&machine.label, bound + machine.rounding);
            assert!(error <= bound, "{label} on {name}: the error is {error}, expected at most {bound}");
            assert_eq!(status, vec![RowStatus::Ok as u8; tokens.len()], "{label}");
            worst = worst.max(error);
        }
        (graph.nodes.iter().map(|node| node.op.name()).collect(), worst)
    }
}

/// Returns the bound of an operation: a value rounded after other arithmetic may differ by one step of its type.
fn bound_of(op: &Op) -> f32 {
    match op {
        Op::NormCast { to, .. } | Op::AddRmsNorm { to, .. } | Op::SwigluLinear { to, .. } => match to {
            ActivationType::BF16 => 2f32.powi(-8),
            ActivationType::F16 => 2f32.powi(-11),
            _ => OP_BOUND,
        },
        _ => OP_BOUND,
    }
}

/// Returns the geometry of the pool that the graph's attention needs, or a default without attention.
fn geometry_of(graph: &Graph) -> KvGeometry {
    let shape = graph.nodes.iter().find_map(|node| match &node.op {
        Op::Attention(shape) => Some((shape.kv_heads, shape.head_dim)),
        _ => None,
    });
    let (kv_heads, head_dim) = shape.unwrap_or((1, 16));
    let layers = graph.nodes.iter().filter(|node| matches!(node.op, Op::Attention(_))).count().max(1);
    KvGeometry::new(layers, kv_heads, head_dim, 16, KvDType::F32)
}

/// Compiles the graph without passes and launches it once: one sequence, blocks in descending order.
fn launch(
    machine: &Machine,
    graph: &Graph,
    source: &dyn WeightSource,
    geometry: KvGeometry,
    tokens: &[u32],
    rows: &[u32],
) -> (Vec<f32>, Vec<u8>) {
    let (device, geometry) =
        (machine.device.as_ref(), geometry.with_block_size(machine.block_size).with_dtype(machine.kv_dtype));
    let mut options = CompileOptions::default();
    options.fusion = Some(0);
    let bucket = Bucket { tokens: TOKENS, logit_rows: rows.len(), seqs: 1, kv_tokens: TOKENS };
    let plan = compile(graph, device.caps().target, machine.numerics, &options, bucket).unwrap();
    let weights = device.upload(source, &graph.weights, 0).unwrap();
    let program = device.load(&[plan], &[weights], &geometry).unwrap();
    let stream = device.stream().unwrap();
    let words = |words: &[u32]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let span = buffer(device, bytes.len());
        device.write(span, &bytes, stream).unwrap();
        span
    };
    let blocks = tokens.len().div_ceil(geometry.block_size) as u32;
    let layout = device.kv_layout(&geometry).unwrap();
    let pool_bytes = (u64::from(blocks) + layout.reserved_blocks) * layout.bytes_per_block;
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let table: Vec<u32> = (0..blocks).rev().collect();
    let io = Bindings::new(buffer(device, pool_bytes as usize))
        .with_token_ids(words(tokens))
        .with_positions(words(&positions))
        .with_block_tables(words(&table))
        .with_logit_rows(words(rows))
        .with_logits(buffer(device, rows.len() * graph.vocab_size * 4))
        .with_argmax(buffer(device, rows.len() * 4))
        .with_row_status(buffer(device, tokens.len()));
    let shape = LaunchShape::new(tokens.len(), 1, rows.len(), blocks as usize);
    let lens = [tokens.len() as u32];
    device.launch(program, &LaunchArgs::new(io, shape, &lens, &lens), stream).unwrap();
    let (mut logits, mut status) = (vec![0; rows.len() * graph.vocab_size * 4], vec![9; tokens.len()]);
    device.read(io.logits, &mut logits, None).unwrap();
    device.read(io.row_status, &mut status, None).unwrap();
    let logits = logits.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
    (logits, status)
}

fn buffer(device: &dyn Device, bytes: usize) -> Span {
    let buffer: BufferId = device.alloc(bytes as u64, MemKind::Device).unwrap();
    Span { buffer, offset: 0, bytes: bytes as u64 }
}

/// Custom operation that halves each element.
#[derive(Debug)]
struct Halve;

impl CustomOp for Halve {
    fn name(&self) -> &'static str {
        "halve"
    }

    fn run(&self, _: &CustomCall<'_>, x: &[f32], out: &mut [f32]) -> Result<(), CustomOpError> {
        out.iter_mut().zip(x).for_each(|(y, x)| *y = x / 2.0);
        Ok(())
    }
}

/// Returns the graph with int8 activations before integer weights, and optionally bf16 activations before bf16 weights.
fn mixed(graph: &Graph, bf16_activations: bool) -> Graph {
    let mut target = Target::new(64);
    target.bf16_activations = bf16_activations;
    let options = CompileOptions::default();
    apply_precision(graph, &PrecisionPolicy::new(&options, Numerics::Fast, target)).unwrap()
}

/// Adds keys, values and queries as inputs, then `write` and attention.
fn attention(
    case: &mut Case,
    (heads, kv_heads, head_dim): (usize, usize, usize),
    window: Option<u32>,
    write: impl FnOnce(&mut Case, ValueId, ValueId) -> (Op, Vec<ValueId>),
) -> ValueId {
    let (q, k) = (case.input(heads * head_dim), case.input(kv_heads * head_dim));
    let v = case.input(kv_heads * head_dim);
    let (op, inputs) = write(case, k, v);
    let stored = case.push(op, &inputs, RowDim::Tokens, &[(0, Elem::Effect)])[0];
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape::new(0, heads, kv_heads, head_dim).with_scale(scale).with_window(window);
    case.one(Op::Attention(shape), &[q, stored], heads * head_dim)
}

const ACTIVATIONS: [ActivationKind; 2] = [ActivationKind::Silu, ActivationKind::GeluTanh];
const STYLES: [RopeStyle; 2] = [RopeStyle::Half, RopeStyle::Interleaved];
const DTYPES: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1];

#[test]
fn every_operation_agrees_with_its_reference() {
    let ran = all_cases_agree(&machines(), |_| true);
    // tests/cpu/ranks.rs tests the collectives, which need several ranks.
    let of_ranks = |name: &&str| matches!(*name, "all_reduce" | "all_gather");
    let all: BTreeSet<&str> = Op::NAMES.into_iter().filter(|name| !of_ranks(name)).collect();
    assert_eq!(ran, all, "the cases do not run all operations");
}

/// The simulated Ascend card computes in 16 bits.
#[cfg(feature = "ascend")]
#[test]
fn every_operation_agrees_with_its_reference_on_the_simulated_ascend_card() {
    let npu = ascend();
    let machine = ascend_machine(&npu);
    let runs = |graph: &Graph| {
        // The card uses another layout of the angles, so a graph that outputs them is skipped.
        let shows_angles = matches!(graph.nodes.last(), Some(Node { op: Op::RopeAngles { .. }, .. }));
        !shows_angles
            && graph.nodes.iter().all(|node| match &node.op {
                Op::Custom(_) => false,
                Op::Cast(to) | Op::NormCast { to, .. } | Op::AddRmsNorm { to, .. } | Op::SwigluLinear { to, .. } => {
                    *to == ActivationType::F32
                }
                Op::Attention(shape) => shape.head_dim % 16 == 0,
                // The card rejects heads that are rotated only in part.
                Op::Rope { head_dim, .. } | Op::QkNormRope { head_dim, .. } | Op::RopeKvWrite { head_dim, .. } => {
                    graph.ropes.iter().all(|rope| 2 * rope.inv_freq.len() == *head_dim)
                }
                _ => true,
            })
    };
    let ran = all_cases_agree(&[machine], runs);
    // Casts belong to precisions that the card rejects; it has no custom operations, and needs several ranks for
    // collectives.
    let not_its_own = ["all_gather", "all_reduce", "cast", "custom", "norm_cast"];
    let all: BTreeSet<&str> = Op::NAMES.into_iter().filter(|name| !not_its_own.contains(name)).collect();
    assert_eq!(ran, all, "the cases do not run all operations");
    npu.assert_clean();
}

/// Runs the cases whose graphs `selects` accepts on all machines; returns the names of the operations that ran.
fn all_cases_agree(machines: &[Machine], selects: impl Fn(&Graph) -> bool) -> BTreeSet<&'static str> {
    let mut ran = BTreeSet::new();
    let (mut seed, mut worst) = (0, 0.0f32);
    let mut check = |label: &str, build: &dyn Fn(&mut Case) -> ValueId| {
        seed += 1;
        let mut case = Case::new(seed);
        let out = build(&mut case);
        if selects(&case.graph) {
            let (names, error) = case.agrees(out, label, seed % 2 == 0, machines);
            ran.extend(names);
            worst = worst.max(error);
        }
    };

    // Widths that are multiples of the vector width, and widths that are not.
    for cols in [1, 48, 77] {
        check("embed and gather_rows", &|case| case.input(cols));
        check("rms_norm", &|case| {
            let (x, norm) = (case.input(cols), case.norm(cols));
            case.one(Op::RmsNorm(norm), &[x], cols)
        });
        for op in [Op::Add, Op::Mul, Op::ActMul(ACTIVATIONS[0]), Op::ActMul(ACTIVATIONS[1])] {
            check(op.name(), &|case| {
                let inputs = [case.input(cols), case.input(cols)];
                case.one(op.clone(), &inputs, cols)
            });
        }
        for kind in ACTIVATIONS {
            check("activation", &|case| {
                let x = case.input(cols);
                case.one(Op::Activation(kind), &[x], cols)
            });
        }
        check("scale", &|case| {
            let x = case.input(cols);
            case.one(Op::Scale(0.22), &[x], cols)
        });
        for output in 0..2 {
            check("add_rms_norm", &|case| {
                let (inputs, norm) = ([case.input(cols), case.input(cols)], case.norm(cols));
                let op = Op::AddRmsNorm { norm, to: ActivationType::F32 };
                case.push(op, &inputs, RowDim::Tokens, &[(cols, Elem::F32); 2])[output]
            });
        }
    }
    check("rope_angles", &|case| case.angles(12));
    check("rms_norm by head", &|case| {
        let (x, norm) = (case.input(60), case.norm(20));
        case.one(Op::RmsNorm(norm), &[x], 60)
    });

    for cols in [32, 96] {
        for to in [ActivationType::Int8, ActivationType::BF16, ActivationType::F16] {
            check("cast", &|case| {
                let x = case.input(cols);
                case.push(Op::Cast(to), &[x], RowDim::Tokens, &[(cols, to.elem())])[0]
            });
            check("norm_cast", &|case| {
                let (x, norm) = (case.input(cols), case.norm(cols));
                case.push(Op::NormCast { norm, to }, &[x], RowDim::Tokens, &[(cols, to.elem())])[0]
            });
            for output in 0..2 {
                check("add_rms_norm, rounded", &|case| {
                    let (inputs, norm) = ([case.input(cols), case.input(cols)], case.norm(cols));
                    let op = Op::AddRmsNorm { norm, to };
                    case.push(op, &inputs, RowDim::Tokens, &[(cols, Elem::F32), (cols, to.elem())])[output]
                });
            }
        }
        check("custom", &|case| {
            let x = case.input(cols);
            case.graph.customs.push(RegisteredOp { site: CustomSite::AfterEmbedding, op: Arc::new(Halve) });
            case.one(Op::Custom(0), &[x], cols)
        });
    }

    for dtype in DTYPES {
        for (n, bias) in [(16, false), (50, true)] {
            check("linear", &|case| {
                let (x, part) = (case.input(64), case.part(dtype, n, 64, bias));
                case.one(Op::Linear(part), &[x], n)
            });
            for output in 0..3 {
                check("linear_multi", &|case| {
                    let x = case.input(64);
                    let widths = [n, 16, 33];
                    let parts = widths.map(|n| case.part(dtype, n, 64, bias)).to_vec();
                    case.push(Op::LinearMulti(parts), &[x], RowDim::Tokens, &widths.map(|n| (n, Elem::F32)))[output]
                });
            }
            for to in [ActivationType::F32, ActivationType::BF16, ActivationType::F16, ActivationType::Int8] {
                if to == ActivationType::Int8 && !dtype.is_quantized() {
                    continue;
                }
                check("swiglu_linear", &|case| {
                    let (inputs, part) = ([case.input(96), case.input(96)], case.part(dtype, n, 96, bias));
                    case.one(Op::SwigluLinear { activation: ActivationKind::Silu, part, to }, &inputs, n)
                });
                if to != ActivationType::F32 {
                    check("linear over rounded rows", &|case| {
                        let (x, part) = (case.input(96), case.part(dtype, n, 96, bias));
                        let x = case.push(Op::Cast(to), &[x], RowDim::Tokens, &[(96, to.elem())])[0];
                        case.one(Op::Linear(part), &[x], n)
                    });
                }
            }
        }
    }

    for style in STYLES {
        // Rotation of whole heads and of a part of them.
        for pairs in [8, 5] {
            check("rope", &|case| {
                let inputs = [case.input(48), case.angles(pairs)];
                case.one(Op::Rope { head_dim: 16, style }, &inputs, 48)
            });
            check("qk_norm_rope", &|case| {
                let (inputs, norm) = ([case.input(48), case.angles(pairs)], case.norm(16));
                case.one(Op::QkNormRope { norm, head_dim: 16, style }, &inputs, 48)
            });
            for normed in [false, true] {
                check("rope_kv_write", &|case| {
                    attention(case, (4, 2, 16), None, |case, k, v| {
                        let norm = normed.then(|| case.norm(16));
                        let angles = case.angles(pairs);
                        (Op::RopeKvWrite { layer: 0, head_dim: 16, style, norm }, vec![k, angles, v])
                    })
                });
            }
        }
    }
    for shape in [(4, 2, 16), (3, 1, 20), (2, 2, 64)] {
        for window in [None, Some(1), Some(5), Some(16), Some(100)] {
            check("kv_write and attention", &|case| {
                attention(case, shape, window, |_, k, v| (Op::KvWrite { layer: 0 }, vec![k, v]))
            });
        }
    }
    println!("{seed} cases; largest error {worst}");
    ran
}

#[test]
fn rows_that_are_not_finite_say_so() {
    let mut case = Case::new(1);
    let mut values = case.numbers(TOKENS * 80);
    for (row, bad) in [(3, f32::NAN), (20, f32::INFINITY), (35, f32::NEG_INFINITY)] {
        values[row * 80 + 70 + row % 10] = bad;
    }
    let table = case.weight_of(DType::F32, &[TOKENS, 80], &values);
    let x = case.one(Op::Embed { table, first_id: 0 }, &[], 80);
    case.observe(x, false);
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let geometry = geometry_of(&case.graph);
    let expected = ReferenceModel::new(&case.graph, &case.source, KvDType::F32).unwrap().forward(&tokens, &tokens);
    let bad: Vec<usize> = (0..TOKENS).filter(|&row| expected.status[row] == RowStatus::NonFinite).collect();
    assert_eq!(bad, [3, 20, 35]);
    for machine in machines() {
        let (_, status) = launch(&machine, &case.graph, &case.source, geometry, &tokens, &tokens);
        let expected: Vec<u8> = expected.status.iter().map(|status| *status as u8).collect();
        assert_eq!(status, expected, "{}", machine.label);
    }
}

// ----------------------------------------------------------------------------------------------------- models

fn models() -> Vec<PathBuf> {
    let mut models = conformance_models();
    models.push(data("fable"));
    models.extend(["q8_0", "Q4_K_M"].map(|kind| data(&format!("fable/gguf/fable-{kind}.gguf"))));
    models
}

fn graph(path: &Path) -> (Graph, weights::ModelFiles) {
    let files = model::open(path).unwrap();
    let config = match &files.kind {
        ModelKind::Gguf(file) => config_from_gguf(file).unwrap(),
        ModelKind::Folder(folder) => config_from_hub(&std::fs::read(folder.join("config.json")).unwrap()).unwrap(),
        other => panic!("{other:?}"),
    };
    (decoder_graph(&config, files.source.as_ref()).unwrap(), files)
}

fn on_device(path: &Path, device: &Arc<CpuDevice>, numerics: Numerics, fusion: u8) -> Model {
    let mut config = small_config();
    config.numerics = numerics;
    config.compile.fusion = Some(fusion);
    config.max_num_batched_tokens = 512;
    Model::new(Engine::builder(path).config(config).device(device.clone()))
}

/// Returns pseudo-random ids from the whole vocabulary.
fn prompt(graph: &Graph, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i * 31 + i * 17 + 5) % graph.vocab_size) as u32).collect()
}

#[test]
fn models_agree_with_the_interpreter() {
    let devices = devices();
    let mut worst = 0.0f32;
    for path in models() {
        let (graph, files) = graph(&path);
        let prompt = prompt(&graph, 39);
        let rows: Vec<u32> = (0..prompt.len() as u32).collect();
        let mut reference = ReferenceModel::new(&graph, files.source.as_ref(), KvDType::F32).unwrap();
        let expected = reference.forward(&prompt, &rows);
        assert!(expected.status.iter().all(|status| *status == RowStatus::Ok));
        for device in &devices {
            for fusion in [0, 3] {
                let label = format!("{} on {:?}, fusion {fusion}", path.display(), device.isa());
                let mut model = on_device(&path, device, Numerics::Exact, fusion);
                // A chunk, a shorter one, then single tokens; the interpreter runs all tokens at once.
                let got: Vec<f32> = [&prompt[..20], &prompt[20..37], &prompt[37..38], &prompt[38..]]
                    .into_iter()
                    .flat_map(|chunk| model.forward(chunk, chunk.len()))
                    .flatten()
                    .collect();
                let error = error(&got, &expected.logits);
                assert!(error <= MODEL_BOUND, "{label}: the error is {error}");
                worst = worst.max(error);
            }
        }
    }
    println!("largest error {worst}");
}

/// No conformance model with heads that a card supports has factors on embeddings, scores, residual sums and logits, so
/// this test adds them to a model.
#[test]
fn factors_of_a_description_agree_with_the_interpreter_on_every_device() {
    let path = data("conformance/llama-gqa-tied");
    let files = model::open(&path).unwrap();
    let mut config = config_from_hub(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    let plain = decoder_graph(&config, files.source.as_ref()).unwrap();
    (config.embedding_scale, config.logit_scale) = (Some(3.0), Some(0.5));
    for layer in &mut config.layers {
        layer.residual_scale = Some(0.22);
        let AttentionConfig::GroupedQuery(attention) = &mut layer.attention else { panic!("{layer:?}") };
        attention.scale = 0.0625;
    }
    let graph = decoder_graph(&config, files.source.as_ref()).unwrap();
    let (tokens, rows) = (prompt(&graph, TOKENS), (0..TOKENS as u32).collect::<Vec<_>>());
    let interpreted = |graph: &Graph| {
        let mut reference = ReferenceModel::new(graph, files.source.as_ref(), KvDType::F32).unwrap();
        reference.forward(&tokens, &rows).logits
    };
    let expected = interpreted(&graph);
    assert!(error(&expected, &interpreted(&plain)) > 0.1, "the factors must change the logits");
    let geometry = geometry_of(&graph);
    let agrees = |machine: &Machine| {
        let (got, _) = launch(machine, &graph, files.source.as_ref(), geometry, &tokens, &rows);
        let error = error(&got, &expected);
        assert!(error <= MODEL_BOUND + machine.rounding, "{}: the error is {error}", machine.label);
    };
    machines().iter().for_each(agrees);
    #[cfg(feature = "ascend")]
    {
        let npu = ascend();
        agrees(&ascend_machine(&npu));
        npu.assert_clean();
    }
}

/// Chunks and graph passes do not change the results of the interpreter itself.
#[test]
fn the_interpreter_runs_fused_graphs_and_chunks_alike() {
    for path in models() {
        let (graph, files) = graph(&path);
        let prompt = prompt(&graph, 12);
        let rows: Vec<u32> = (0..12).collect();
        let run = |graph: &Graph, chunk: usize| {
            let mut model = ReferenceModel::new(graph, files.source.as_ref(), KvDType::F32).unwrap();
            let mut logits = Vec::new();
            for _ in 0..2 {
                model.restart();
                let chunks = prompt.chunks(chunk).flat_map(|ids| model.forward(ids, &rows[..ids.len()]).logits);
                logits = chunks.collect();
            }
            logits
        };
        for graph in [graph.clone(), mixed(&graph, false)] {
            let expected = run(&graph, 12);
            for (level, chunk) in [(0, 5), (1, 12), (2, 12), (3, 12), (3, 1)] {
                assert!(
                    run(&fuse(&graph, level, OpSet::ALL, AttentionSchedules::default()).0, chunk) == expected,
                    "{}: level {level}",
                    path.display()
                );
            }
        }
    }
}

#[test]
fn int8_activations_and_half_keys_agree_with_the_interpreter() {
    let mut worst = 0.0f32;
    for path in models() {
        let (graph, files) = graph(&path);
        let prompt = prompt(&graph, 24);
        let rows: Vec<u32> = (0..24).collect();
        let [without, with] = [false, true].map(|bf16_activations| {
            let graph = mixed(&graph, bf16_activations);
            let mut reference = ReferenceModel::new(&graph, files.source.as_ref(), KvDType::F16).unwrap();
            reference.forward(&prompt, &rows)
        });
        for device in devices() {
            let expected = if device.caps().target.bf16_activations { &with } else { &without };
            let got = on_device(&path, &device, Numerics::Fast, 2).forward(&prompt, 24).concat();
            let error = error(&got, &expected.logits);
            assert!(error <= FAST_BOUND, "{} on {:?}: the error is {error}", path.display(), device.isa());
            worst = worst.max(error);
        }
    }
    println!("largest error {worst}");
}

/// Only stored keys and values are rounded here, so the device must round them like the interpreter.
#[test]
fn int8_keys_agree_with_the_interpreter() {
    let mut worst = 0.0f32;
    for path in models() {
        let (graph, files) = graph(&path);
        let prompt = prompt(&graph, 24);
        let rows: Vec<u32> = (0..24).collect();
        let run = |kv| ReferenceModel::new(&graph, files.source.as_ref(), kv).unwrap().forward(&prompt, &rows).logits;
        let [expected, in_f32] = [KvDType::I8, KvDType::F32].map(run);
        for device in devices() {
            let label = format!("{} on {:?}", path.display(), device.isa());
            let mut config = small_config();
            (config.numerics, config.kv_dtype) = (Numerics::Fast, Some(KvDType::I8));
            config.compile.precision = Some(Precision::F32);
            let got = Model::new(Engine::builder(&path).config(config).device(device)).forward(&prompt, 24).concat();
            let error_of = error(&got, &expected);
            assert!(
                error(&got, &in_f32) > 2.0 * INT8_KV_BOUND,
                "{label}: the result is as close to that without rounding"
            );
            assert!(error_of <= INT8_KV_BOUND, "{label}: the error is {error_of}");
            worst = worst.max(error_of);
        }
    }
    println!("largest error {worst}");
}
