//! Tests the contract of [`Device`] on the CPU device.
//!
//! A mistake of the caller returns [`DeviceError::Invalid`]; it never panics, and never accesses a byte outside a bound
//! buffer. Threads, block size and the layout of the blocks never change a result.

#![allow(missing_docs, clippy::cast_possible_truncation)] // sizes here are small

#[allow(dead_code)] // this test uses only a part
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::model::{Model, small_config};
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, Isa};
use ascend_llm::device::{
    Bindings, BufferId, Device as _, DeviceError, EventId, KvLayout, LaunchArgs, LaunchShape, MemKind, ProgramId, Span,
    StreamId, WeightSetId,
};
use ascend_llm::engine::Engine;
use ascend_llm::graph::{Bucket, CompileError, CompileOptions, Graph, Numerics, Op, Plan, compile};
use ascend_llm::kv_cache::{BlockId, KvDType, KvGeometry};
use ascend_llm::model::{config_from_hub, decoder_graph};
use ascend_llm::weights::safetensors::SafetensorsFolder;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance").join(name)
}

fn device_with(threads: usize, isa: Isa) -> CpuDevice {
    let mut options = CpuOptions::default();
    (options.threads, options.isa) = (Some(threads), Some(isa));
    CpuDevice::new(options).unwrap()
}

fn device() -> CpuDevice {
    device_with(2, Isa::detect())
}

fn invalid<T: std::fmt::Debug>(what: &str, outcome: Result<T, DeviceError>) -> String {
    match outcome {
        Err(DeviceError::Invalid { what }) => what,
        other => panic!("{what}: {other:?}"),
    }
}

fn refused<T: std::fmt::Debug>(what: &str, outcome: Result<T, CompileError>) {
    assert!(matches!(outcome, Err(CompileError::Invalid(_))), "{what}: {outcome:?}");
}

fn whole(device: &CpuDevice, bytes: u64) -> Span {
    Span { buffer: device.alloc(bytes, MemKind::Device).unwrap(), offset: 0, bytes }
}

fn bytes_of(device: &CpuDevice, span: Span) -> Vec<u8> {
    let mut bytes = vec![0; span.bytes as usize];
    device.read(span, &mut bytes, None).unwrap();
    bytes
}

// ------------------------------------------------------------------------------------------- buffers and queues

#[test]
fn buffers_are_zeroed_and_keep_what_is_written() {
    let device = device();
    let stream = device.stream().unwrap();
    for kind in [MemKind::Device, MemKind::Pinned] {
        for bytes in [0, 1, 100, 5 << 20] {
            let buffer = device.alloc(bytes, kind).unwrap();
            let span = Span { buffer, offset: 0, bytes };
            assert!(bytes_of(&device, span).iter().all(|byte| *byte == 0));
            let data: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
            device.write(span, &data, stream).unwrap();
            assert!(bytes_of(&device, span) == data);
            device.free(buffer);
            device.free(buffer);
        }
    }
    let huge = device.alloc(u64::MAX, MemKind::Device);
    assert!(matches!(huge, Err(DeviceError::OutOfMemory { .. })), "{huge:?}");
}

#[test]
fn copies_move_exactly_their_spans() {
    let device = device();
    let stream = device.stream().unwrap();
    let (a, b) = (whole(&device, 16), whole(&device, 16));
    device.write(a, &(0..16).collect::<Vec<u8>>(), stream).unwrap();
    let part = |span: Span, offset, bytes| Span { offset, bytes, ..span };
    device.copy(part(b, 3, 5), part(a, 10, 5), stream).unwrap();
    assert_eq!(bytes_of(&device, b), [0, 0, 0, 10, 11, 12, 13, 14, 0, 0, 0, 0, 0, 0, 0, 0]);
    // Copy within one buffer, with overlap.
    device.copy(part(a, 2, 8), part(a, 0, 8), stream).unwrap();
    assert_eq!(bytes_of(&device, a)[..10], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]);
    device.copy(part(a, 0, 0), part(b, 16, 0), stream).unwrap();
}

#[test]
fn sampled_tokens_are_copied_to_the_next_ids() {
    let device = device();
    let stream = device.stream().unwrap();
    let (ids, argmax) = (whole(&device, 16), whole(&device, 12));
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    device.write(ids, &words(&[1, 2, 3, 4]), stream).unwrap();
    device.write(argmax, &words(&[70, u32::MAX, 90]), stream).unwrap();
    device.copy_sampled_tokens(ids, argmax, &[(3, 0), (0, 2), (1, 1), (2, 0)], stream).unwrap();
    // The placeholder becomes a token id that a launch accepts.
    assert_eq!(bytes_of(&device, ids), words(&[90, 0, 70, 70]));
    device.copy_sampled_tokens(ids, argmax, &[], stream).unwrap();
    for pair in [(4, 0), (0, 3), (u32::MAX, 0), (0, u32::MAX)] {
        invalid("a row outside", device.copy_sampled_tokens(ids, argmax, &[(1, 0), pair], stream));
    }
    invalid("an unknown stream", device.copy_sampled_tokens(ids, argmax, &[], StreamId(0)));
    assert_eq!(bytes_of(&device, ids), words(&[90, 0, 70, 70]), "a rejected call copied a token");
    let event = device.record(stream).unwrap();
    device.read(ids, &mut [0; 16], Some(event)).unwrap();
    invalid("an event that is not yet recorded", device.read(ids, &mut [0; 16], Some(EventId(event.0 + 1))));
}

#[test]
fn foreign_and_stale_ids_and_spans_out_of_bounds_are_invalid() {
    let (device, other) = (device(), device());
    let (stream, foreign_stream) = (device.stream().unwrap(), other.stream().unwrap());
    let good = whole(&device, 64);
    let freed = whole(&device, 64);
    device.free(freed.buffer);
    let mut bad: Vec<Span> = [whole(&other, 64).buffer, freed.buffer, BufferId(0), BufferId(1), BufferId(u64::MAX)]
        .map(|buffer| Span { buffer, ..good })
        .to_vec();
    // The ids of a stream and of an event are not buffer ids, even if the numbers are equal.
    bad.push(Span { buffer: BufferId(stream.0 | 1 << 30), ..good });
    for (offset, bytes) in [(0, 65), (1, 64), (65, 0), (64, 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
        bad.push(Span { offset, bytes, ..good });
    }
    for span in bad {
        let label = format!("{span:?}");
        let len = span.bytes.min(1 << 20) as usize;
        invalid(&label, device.write(span, &vec![0; len], stream));
        invalid(&label, device.read(span, &mut vec![0; len], None));
        invalid(&label, device.copy(span, Span { bytes: span.bytes, ..good }, stream));
        invalid(&label, device.copy(Span { bytes: span.bytes, ..good }, span, stream));
        invalid(&label, device.copy(span, span, stream));
    }
    invalid("a short write", device.write(good, &[0; 63], stream));
    invalid("a long write", device.write(good, &[0; 65], stream));
    invalid("a short read", device.read(good, &mut [0; 63], None));
    invalid("unequal copy", device.copy(good, Span { bytes: 32, ..good }, stream));

    for on in [foreign_stream, StreamId(0), StreamId(u64::MAX), StreamId(stream.0 + 1)] {
        invalid("write", device.write(good, &[1; 64], on));
        invalid("copy", device.copy(good, good, on));
        invalid("record", device.record(on));
        let event = device.record(stream).unwrap();
        invalid("wait", device.wait(on, event));
        invalid("blocks", device.copy_blocks(&layout(&device), good, good, &[], on));
    }
    assert!(bytes_of(&device, good).iter().all(|byte| *byte == 0), "a rejected call wrote to the buffer");
    // Freeing an unknown buffer has no effect, on this device or on the other one.
    device.free(whole(&other, 8).buffer);
    device.free(BufferId(7));
    device.unload(ProgramId(7));
    device.release_weights(WeightSetId(7));
}

#[test]
fn events_grow_and_foreign_ones_are_invalid() {
    let (device, other) = (device(), device());
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    assert_ne!(one, two);
    let mut last = None;
    for on in [one, two, one, one, two] {
        let event = device.record(on).unwrap();
        assert!(last.is_none_or(|last| last < event), "event ids must increase");
        last = Some(event);
        device.wait(two, event).unwrap();
        device.wait(one, event).unwrap();
        device.wait_host(event).unwrap();
    }
    let last = last.unwrap();
    let foreign = other.record(other.stream().unwrap()).unwrap();
    for event in [foreign, EventId(0), EventId(last.0 + 1), EventId(u64::MAX)] {
        invalid("wait", device.wait(one, event));
        invalid("wait_host", device.wait_host(event));
    }
}

#[test]
fn an_instruction_set_that_is_missing_is_refused() {
    for isa in [Isa::Plain, Isa::Avx2, Isa::Avx512, Isa::Avx512Vnni, Isa::Avx512Bf16, Isa::Neon, Isa::NeonDot] {
        let mut options = CpuOptions::default();
        (options.isa, options.threads) = (Some(isa), Some(1));
        match CpuDevice::new(options) {
            Ok(device) => assert!(isa.is_available() && device.isa() == isa),
            Err(error) => assert!(!isa.is_available() && matches!(error, DeviceError::Invalid { .. })),
        }
    }
    let mut options = CpuOptions::default();
    for threads in [0, 100_000] {
        options.threads = Some(threads);
        invalid("threads", CpuDevice::new(options.clone()));
    }
}

// --------------------------------------------------------------------------------------------------- KV blocks

const GEOMETRY: KvGeometry = KvGeometry::new(2, 2, 16, 16, KvDType::F32);

fn layout(device: &CpuDevice) -> KvLayout {
    device.kv_layout(&GEOMETRY).unwrap()
}

#[test]
fn layouts_differ_where_bytes_do_and_impossible_ones_are_invalid() {
    let device = device();
    let mut ids = std::collections::BTreeSet::new();
    for block_size in [16, 32, 1024] {
        for dtype in device.caps().kv_dtypes.clone() {
            for head_dim in [16, 20] {
                let geometry = GEOMETRY.with_block_size(block_size).with_dtype(dtype).with_head_dim(head_dim);
                let layout = device.kv_layout(&geometry).unwrap();
                assert!(layout.bytes_per_block >= geometry.bytes_per_block() as u64);
                assert!(ids.insert(layout.id), "two layouts have the same id");
            }
        }
    }
    let huge = usize::MAX / 16 * 16;
    for geometry in [
        GEOMETRY.with_block_size(0),
        GEOMETRY.with_block_size(8),
        GEOMETRY.with_block_size(24),
        GEOMETRY.with_block_size(2048),
        GEOMETRY.with_block_size(huge),
        GEOMETRY.with_layers(0),
        GEOMETRY.with_kv_heads(0),
        GEOMETRY.with_head_dim(0),
        GEOMETRY.with_layers(usize::MAX),
        GEOMETRY.with_head_dim(1 << 60).with_kv_heads(1 << 60),
    ] {
        invalid(&format!("{geometry:?}"), device.kv_layout(&geometry));
    }
}

#[test]
fn blocks_are_copied_whole_and_in_order() {
    for dtype in device().caps().kv_dtypes.clone() {
        blocks_are_copied(&GEOMETRY.with_dtype(dtype));
    }
}

fn blocks_are_copied(geometry: &KvGeometry) {
    let device = device();
    let stream = device.stream().unwrap();
    let layout = device.kv_layout(geometry).unwrap();
    let bytes = layout.bytes_per_block as usize;
    let pool = |seed: u8| {
        let span = whole(&device, 4 * layout.bytes_per_block);
        let data: Vec<u8> = (0..4).flat_map(|block| vec![seed + block; bytes]).collect();
        device.write(span, &data, stream).unwrap();
        span
    };
    let blocks = |span: Span| -> Vec<u8> {
        let all = bytes_of(&device, span);
        let blocks = all.chunks(bytes);
        blocks.map(|block| if block.iter().all(|byte| *byte == block[0]) { block[0] } else { 255 }).collect()
    };
    let pair = |from, to| (BlockId(from), BlockId(to));
    let (a, b) = (pool(1), pool(11));
    device.copy_blocks(&layout, a, b, &[pair(0, 3), pair(2, 0)], stream).unwrap();
    assert_eq!((blocks(a), blocks(b)), (vec![1, 2, 3, 4], vec![3, 12, 13, 1]));
    // A later pair copies the result of an earlier one; copying a block to itself has no effect.
    device.copy_blocks(&layout, a, a, &[pair(0, 1), pair(1, 2), pair(3, 3)], stream).unwrap();
    assert_eq!(blocks(a), [1, 1, 1, 4]);
    // A part of a buffer can be a pool too.
    let tail = Span { offset: 2 * layout.bytes_per_block, bytes: 2 * layout.bytes_per_block, ..a };
    device.copy_blocks(&layout, tail, b, &[pair(1, 1)], stream).unwrap();
    assert_eq!(blocks(b), [3, 4, 13, 1]);

    let before = (blocks(a), blocks(b));
    let unknown = Span { buffer: BufferId(3), ..a };
    let outside = Span { bytes: a.bytes + 1, ..a };
    let forged = |bytes_per_block| layout.clone().with_bytes_per_block(bytes_per_block);
    for (label, layout, src, dst, pairs) in [
        ("from outside", layout.clone(), a, b, vec![pair(0, 0), pair(4, 0)]),
        ("to outside", layout.clone(), a, b, vec![pair(0, 0), pair(0, 4)]),
        ("far outside", layout.clone(), a, b, vec![pair(0, 0), pair(u32::MAX, 0)]),
        ("beyond a part", layout.clone(), tail, b, vec![pair(0, 0), pair(2, 0)]),
        ("unknown source", layout.clone(), unknown, b, vec![pair(0, 0)]),
        ("unknown target", layout.clone(), a, unknown, vec![]),
        ("pool out of its buffer", layout.clone(), outside, b, vec![]),
        ("forged layout", forged(u64::MAX), a, b, vec![pair(0, 0)]),
        ("forged layout", forged(u64::MAX / 2), a, b, vec![pair(2, 0)]),
    ] {
        invalid(label, device.copy_blocks(&layout, src, dst, &pairs, stream));
    }
    assert_eq!((blocks(a), blocks(b)), before, "a rejected call copied a block");
}

// ---------------------------------------------------------------------------------------------------- programs

/// Model loaded on a device, with buffers for two sequences: 5 rows of a prompt, and one row after 17 tokens.
struct Rig {
    device: CpuDevice,
    graph: Graph,
    plan: Plan,
    weights: WeightSetId,
    program: ProgramId,
    stream: StreamId,
    io: Bindings,
    shape: LaunchShape,
    q_lens: Vec<u32>,
    kv_lens: Vec<u32>,
}

const BUCKET: Bucket = Bucket { tokens: 8, logit_rows: 3, seqs: 3, kv_tokens: 64 };
const POOL_BLOCKS: u64 = 6;

impl Rig {
    fn new() -> Self {
        let device = device();
        let folder = folder("llama-gqa-tied");
        let source = SafetensorsFolder::open(&folder).unwrap();
        let config = config_from_hub(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        let graph = decoder_graph(&config, &source).unwrap();
        let plan = compile(&graph, device.caps().target, Numerics::Exact, &CompileOptions::default(), BUCKET).unwrap();
        let weights = device.upload(&source, &graph.weights, 0).unwrap();
        let program = device.load(std::slice::from_ref(&plan), &[weights], &GEOMETRY).unwrap();
        let stream = device.stream().unwrap();
        let words = |words: &[u32]| {
            let span = whole(&device, 4 * words.len() as u64);
            device.write(span, &words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>(), stream).unwrap();
            span
        };
        let io = Bindings::new(whole(&device, POOL_BLOCKS * layout(&device).bytes_per_block))
            .with_token_ids(words(&[5, 6, 7, 8, 9, 10]))
            .with_positions(words(&[0, 1, 2, 3, 4, 17]))
            .with_block_tables(words(&[3, 0, 1, 4]))
            .with_logit_rows(words(&[4, 5]))
            .with_logits(whole(&device, 2 * 160 * 4))
            .with_argmax(whole(&device, 2 * 4))
            .with_row_status(whole(&device, 6));
        let shape = LaunchShape::new(6, 2, 2, 2);
        Self { device, graph, plan, weights, program, stream, io, shape, q_lens: vec![5, 1], kv_lens: vec![5, 18] }
    }

    fn launch(&self) -> Result<(), DeviceError> {
        let args = LaunchArgs::new(self.io, self.shape, &self.q_lens, &self.kv_lens);
        self.device.launch(self.program, &args, self.stream)
    }

    fn write(&self, span: Span, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.device.write(Span { bytes: bytes.len() as u64, ..span }, &bytes, self.stream).unwrap();
    }

    fn logits(&self) -> Vec<u8> {
        bytes_of(&self.device, self.io.logits)
    }
}

#[test]
fn a_sound_launch_runs_and_repeats() {
    let rig = Rig::new();
    rig.launch().unwrap();
    let first = rig.logits();
    assert!(first.iter().any(|byte| *byte != 0));
    assert_eq!(bytes_of(&rig.device, rig.io.row_status), [0; 6]);
    rig.launch().unwrap();
    assert!(rig.logits() == first);
}

#[test]
fn unknown_programs_weights_and_streams_are_invalid() {
    let mut rig = Rig::new();
    let other = Rig::new();
    let program = rig.program;
    for id in [other.program, ProgramId(0), ProgramId(rig.weights.0), ProgramId(u64::MAX)] {
        rig.program = id;
        invalid("program", rig.launch());
    }
    rig.program = program;
    let stream = rig.stream;
    for id in [other.stream, StreamId(0), StreamId(stream.0 + 1)] {
        rig.stream = id;
        invalid("stream", rig.launch());
    }
    rig.stream = stream;
    for weights in [other.weights, WeightSetId(0), WeightSetId(program.0)] {
        refused("weights", rig.device.load(std::slice::from_ref(&rig.plan), &[weights], &GEOMETRY));
    }
    // Weights are kept as long as a program uses them; after `unload` a program no longer exists.
    rig.device.release_weights(rig.weights);
    rig.launch().unwrap();
    refused("released weights", rig.device.load(std::slice::from_ref(&rig.plan), &[rig.weights], &GEOMETRY));
    rig.device.unload(program);
    invalid("unloaded", rig.launch());
}

type Break = (&'static str, Box<dyn Fn(&mut Rig)>);

fn breaks() -> Vec<Break> {
    fn case(label: &'static str, change: impl Fn(&mut Rig) + 'static) -> Break {
        (label, Box::new(change))
    }
    let span =
        |pick: fn(&mut Bindings) -> &mut Span, change: fn(&mut Span)| move |rig: &mut Rig| change(pick(&mut rig.io));
    let mut cases = vec![
        case("more tokens than rows", |rig| rig.shape.tokens += 1),
        case("fewer tokens than rows", |rig| rig.shape.tokens -= 1),
        case("no tokens", |rig| rig.shape.tokens = 0),
        case("tokens beyond counting", |rig| rig.shape.tokens = usize::MAX),
        case("more sequences", |rig| rig.shape.seqs += 1),
        case("fewer sequences", |rig| rig.shape.seqs -= 1),
        case("sequences beyond counting", |rig| rig.shape.seqs = usize::MAX),
        case("more logit rows", |rig| rig.shape.logit_rows += 1),
        case("fewer logit rows", |rig| rig.shape.logit_rows -= 1),
        case("logit rows beyond counting", |rig| rig.shape.logit_rows = usize::MAX),
        case("a longer stride", |rig| rig.shape.table_stride += 1),
        case("a shorter stride", |rig| rig.shape.table_stride -= 1),
        case("a stride beyond counting", |rig| rig.shape.table_stride = usize::MAX),
        case("no stride and no tables", |rig| {
            rig.shape.table_stride = 0;
            rig.io.block_tables.bytes = 0;
        }),
        case("a stride of one block", |rig| {
            rig.shape.table_stride = 1;
            rig.io.block_tables.bytes = 8;
        }),
        case("beyond the bucket", |rig| {
            (rig.shape.tokens, rig.q_lens, rig.kv_lens) = (9, vec![8, 1], vec![8, 18]);
            rig.io.token_ids = whole(&rig.device, 36);
            rig.io.positions = whole(&rig.device, 36);
        }),
        case("more sequences than the bucket", |rig| {
            (rig.shape.seqs, rig.q_lens, rig.kv_lens) = (4, vec![2, 2, 1, 1], vec![2, 2, 1, 1]);
            rig.io.block_tables = whole(&rig.device, 32);
            rig.write(rig.io.block_tables, &[0, 0, 1, 0, 2, 0, 3, 0]);
        }),
        case("longer than the bucket", |rig| {
            rig.shape.table_stride = 5;
            rig.kv_lens[1] = 65;
            rig.io.block_tables = whole(&rig.device, 40);
            rig.write(rig.io.block_tables, &[3, 0, 0, 0, 0, 1, 1, 1, 1, 4]);
        }),
        case("more rows than tokens", |rig| rig.kv_lens[0] = 4),
        case("a sequence of no rows", |rig| rig.q_lens = vec![6, 0]),
        case("a sequence of no tokens", |rig| (rig.q_lens, rig.kv_lens) = (vec![6, 0], vec![6, 0])),
        case("lengths that do not add up", |rig| rig.q_lens[0] = 4),
        case("lengths beyond counting", |rig| (rig.q_lens, rig.kv_lens) = (vec![u32::MAX; 2], vec![u32::MAX; 2])),
        case("too few lengths", |rig| rig.q_lens.truncate(1)),
        case("too few KV lengths", |rig| rig.kv_lens.truncate(1)),
        case("too many lengths", |rig| (rig.q_lens, rig.kv_lens) = (vec![5, 1, 1], vec![5, 18, 1])),
        case("longer than its table", |rig| rig.kv_lens[1] = 33),
        case("much longer than its table", |rig| rig.kv_lens[1] = u32::MAX),
        case("an id beyond the table", |rig| rig.write(rig.io.token_ids, &[160])),
        case("an id far beyond", |rig| rig.write(rig.io.token_ids, &[u32::MAX])),
        case("a logit row beyond the batch", |rig| rig.write(rig.io.logit_rows, &[6])),
        case("a logit row far beyond", |rig| rig.write(rig.io.logit_rows, &[u32::MAX])),
        case("a block beyond the pool", |rig| rig.write(rig.io.block_tables, &[POOL_BLOCKS as u32])),
        case("a block far beyond", |rig| rig.write(rig.io.block_tables, &[3, 0, 1, u32::MAX])),
        case("one block for two sequences", |rig| rig.write(rig.io.block_tables, &[4])),
        case("one block twice in a table", |rig| {
            (rig.q_lens, rig.kv_lens) = (vec![1, 5], vec![5, 18]);
            rig.write(rig.io.block_tables, &[3, 0, 4, 4]);
        }),
        case("a smaller pool", |rig| rig.io.kv_pool.bytes = 4 * layout(&rig.device).bytes_per_block),
        case("no pool", |rig| rig.io.kv_pool.bytes = 0),
        case("one buffer twice", |rig| rig.io.positions = rig.io.token_ids),
        case("the pool as logits", |rig| rig.io.logits.buffer = rig.io.kv_pool.buffer),
    ];
    let bindings: [fn(&mut Bindings) -> &mut Span; 8] = [
        |io| &mut io.token_ids,
        |io| &mut io.positions,
        |io| &mut io.block_tables,
        |io| &mut io.logit_rows,
        |io| &mut io.logits,
        |io| &mut io.argmax,
        |io| &mut io.row_status,
        |io| &mut io.kv_pool,
    ];
    for (index, binding) in bindings.into_iter().enumerate() {
        cases.push(case("an unknown buffer", span(binding, |span| span.buffer = BufferId(2))));
        cases.push(case("a freed buffer", move |rig| {
            let buffer = binding(&mut rig.io).buffer;
            rig.device.free(buffer);
        }));
        cases.push(case("a span out of its buffer", span(binding, |span| span.bytes += 4)));
        cases.push(case("a span beyond counting", span(binding, |span| span.offset = u64::MAX)));
        // The pool may have any number of bytes, and start at any offset.
        if index < 7 {
            cases.push(case("a span too short", span(binding, |span| span.bytes -= 1)));
            cases.push(case("an empty span", span(binding, |span| span.bytes = 0)));
            cases.push(case("a shifted span", span(binding, |span| (span.offset, span.bytes) = (1, span.bytes - 1))));
        }
    }
    cases
}

#[test]
fn launches_that_break_a_rule_are_invalid_and_write_nothing() {
    for (label, change) in breaks() {
        let mut rig = Rig::new();
        let (logits, pool) = (rig.io.logits, rig.io.kv_pool);
        change(&mut rig);
        let what = invalid(label, rig.launch());
        assert!(!what.is_empty(), "{label}");
        for span in [logits, pool] {
            let mut bytes = vec![0; span.bytes as usize];
            // A freed buffer counts as unwritten.
            if rig.device.read(span, &mut bytes, None).is_ok() {
                assert!(bytes.iter().all(|byte| *byte == 0), "{label}: the rejected launch wrote to the buffer");
            }
        }
    }
}

#[test]
fn a_pool_may_start_anywhere_and_end_in_half_a_block() {
    let mut rig = Rig::new();
    rig.launch().unwrap();
    let expected = rig.logits();
    for offset in [1, 2, 7, 64] {
        let bytes = rig.io.kv_pool.bytes;
        let span = whole(&rig.device, bytes + 100);
        rig.io.kv_pool = Span { offset, bytes: bytes + 30, ..span };
        rig.launch().unwrap();
        assert!(rig.logits() == expected, "wrong logits at pool offset {offset}");
        rig.io.kv_pool.bytes = bytes;
    }
}

/// Two sequences may read the same block as long as neither writes it.
#[test]
fn shared_blocks_are_read_by_all() {
    let mut rig = Rig::new();
    (rig.q_lens, rig.kv_lens) = (vec![3, 3], vec![19, 19]);
    rig.write(rig.io.positions, &[16, 17, 18, 16, 17, 18]);
    rig.write(rig.io.token_ids, &[5, 6, 7, 5, 6, 7]);
    rig.write(rig.io.block_tables, &[2, 0, 2, 1]);
    rig.write(rig.io.logit_rows, &[2, 5]);
    rig.launch().unwrap();
    let logits = rig.logits();
    let (one, two) = logits.split_at(logits.len() / 2);
    assert!(one == two);
}

#[test]
fn batches_without_logit_rows_and_without_rows_run() {
    let mut rig = Rig::new();
    rig.shape.logit_rows = 0;
    for span in [&mut rig.io.logit_rows, &mut rig.io.logits, &mut rig.io.argmax] {
        span.bytes = 0;
    }
    rig.launch().unwrap();
    rig.shape = LaunchShape::default();
    (rig.q_lens, rig.kv_lens) = (vec![], vec![]);
    for span in [&mut rig.io.token_ids, &mut rig.io.positions, &mut rig.io.block_tables, &mut rig.io.row_status] {
        span.bytes = 0;
    }
    rig.launch().unwrap();
}

#[test]
fn plans_weights_and_geometries_that_do_not_fit_are_refused() {
    let rig = Rig::new();
    let load =
        |plan: &Plan, geometry: &KvGeometry| rig.device.load(std::slice::from_ref(plan), &[rig.weights], geometry);
    for geometry in [
        GEOMETRY.with_block_size(0),
        GEOMETRY.with_block_size(24),
        GEOMETRY.with_layers(1),
        GEOMETRY.with_kv_heads(1),
        GEOMETRY.with_kv_heads(4).with_head_dim(8),
        GEOMETRY.with_head_dim(32),
        GEOMETRY.with_layers(usize::MAX),
    ] {
        refused(&format!("{geometry:?}"), load(&rig.plan, &geometry));
    }
    let broken = |change: &dyn Fn(&mut Plan)| {
        let mut plan = rig.plan.clone();
        change(&mut plan);
        plan
    };
    for (label, plan) in [
        ("a missing operand", broken(&|plan| plan.steps[3].inputs.clear())),
        ("an unknown value", broken(&|plan| plan.steps[3].inputs[0] = usize::MAX)),
        ("a small arena", broken(&|plan| plan.arena_bytes = 128)),
        ("more weights", broken(&|plan| plan.weights.push(plan.weights[0].clone()))),
        ("other weights", broken(&|plan| plan.weights.reverse())),
        ("a weight of another type", broken(&|plan| plan.weights[0].dtype = ascend_llm::weights::DType::F16)),
        ("no rotary table", broken(&|plan| plan.ropes.clear())),
        ("no steps", broken(&|plan| plan.steps.clear())),
        ("another rank", broken(&|plan| plan.rank.index = 1)),
        ("one of two ranks", broken(&|plan| plan.rank.of = 2)),
    ] {
        refused(label, load(&plan, &GEOMETRY));
    }
    refused("no plan", rig.device.load(&[], &[], &GEOMETRY));
    let twice = [rig.plan.clone(), rig.plan.clone()];
    refused("one rank twice", rig.device.load(&twice, &[rig.weights; 2], &GEOMETRY));
    refused("a set too many", rig.device.load(&twice[..1], &[rig.weights; 2], &GEOMETRY));
    // More bytes than an address space has, so the allocation fails on any system.
    let huge = Bucket { tokens: 1 << 39, ..BUCKET };
    let target = rig.device.caps().target;
    let plan = compile(&rig.graph, target, Numerics::Exact, &CompileOptions::default(), huge).unwrap();
    let outcome = load(&plan, &GEOMETRY);
    assert!(matches!(outcome, Err(CompileError::Memory(_))), "{outcome:?}");
    assert!(plan.steps.iter().any(|step| matches!(step.op, Op::Attention(_))));
}

#[test]
fn weights_that_are_not_the_graphs_are_invalid() {
    let rig = Rig::new();
    let source = SafetensorsFolder::open(folder("llama-gqa-tied")).unwrap();
    let upload = |change: &dyn Fn(&mut ascend_llm::graph::Weight)| {
        let mut weights = rig.graph.weights.clone();
        change(&mut weights[0]);
        rig.device.upload(&source, &weights, 0)
    };
    invalid("name", upload(&|weight| weight.name = "nothing".into()));
    invalid("shape", upload(&|weight| weight.shape[0] += 1));
    invalid("dimensions", upload(&|weight| weight.shape.push(1)));
    invalid("type", upload(&|weight| weight.dtype = ascend_llm::weights::DType::Q8_0));
    invalid("role", upload(&|weight| weight.role = ascend_llm::graph::WeightRole::Vector));
}

// --------------------------------------------------------------------------------------- what never changes a result

fn run(name: &str, device: CpuDevice, block_size: u32, numerics: Numerics) -> Vec<f32> {
    let mut config = small_config();
    config.numerics = numerics;
    config.block_size = Some(block_size);
    let mut model = Model::new(Engine::builder(folder(name)).config(config).device(Arc::new(device)));
    let ids: Vec<u32> = (0..90).map(|i| (i * i * 7 + 3) % 160).collect();
    let mut logits = Vec::new();
    for chunk in [&ids[..50], &ids[50..51], &ids[51..]] {
        logits.extend(model.forward(chunk, chunk.len()).concat());
    }
    logits
}

#[test]
fn threads_and_block_sizes_cannot_be_seen() {
    for name in ["llama-gqa-tied", "mistral-sliding"] {
        for numerics in [Numerics::Exact, Numerics::Fast] {
            for &isa in Isa::available() {
                let expected = run(name, device_with(1, isa), 16, numerics);
                for threads in [1, 2, 3] {
                    for block_size in [16, 32, 128] {
                        let got = run(name, device_with(threads, isa), block_size, numerics);
                        assert!(got == expected, "{name}, {isa:?}, {threads} threads, blocks of {block_size}");
                    }
                }
            }
        }
    }
}

/// Sums of f32 in another order (and with fused multiply-adds) over two layers, relative to 1 + the largest logit.
const ISA_BOUND: f32 = 2e-5;

#[test]
fn instruction_sets_agree_within_rounding() {
    for name in ["llama-gqa-tied", "qwen3"] {
        let plain = run(name, device_with(2, Isa::Plain), 16, Numerics::Exact);
        let largest = plain.iter().fold(1.0f32, |most, x| most.max(1.0 + x.abs()));
        for &isa in Isa::available() {
            let got = run(name, device_with(2, isa), 16, Numerics::Exact);
            let error = plain.iter().zip(&got).map(|(a, b)| (a - b).abs() / largest).fold(0.0, f32::max);
            assert!(error <= ISA_BOUND, "{name}, {isa:?}: {error}");
        }
    }
}
