//! [`Device`] for Ascend cards: checks calls on the caller's thread and passes them to the threads of the cards.

#![forbid(unsafe_code)]

use crate::num::to_u32;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ascend_sys::{AscendError, DeviceBuffer, Library, Ops, Pages, Runtime};
use parking_lot::Mutex;

use super::memory::kv_layout::{KvShard, RESERVED_BLOCKS, describe};
use super::memory::staging::SLOT_BYTES;
use super::memory::{ALIGNMENT, padded};
use super::options::{Activations, AscendOpenError, AscendOptions, WeightForm, WeightTiles};
use super::program::Program;
use super::telemetry::CardTelemetry;
use super::weights::pack::pack;
use super::weights::{WeightSet, activation_elem, kv_dtype, layout, place};
use super::worker::command::{Command, pairs_list};
use super::worker::group::WorkerGroup;
use super::worker::{CardInfo, Worker};
use crate::device::{
    BufferId, CustomFailure, Device, DeviceCaps, DeviceError, EventId, KvLayout, LaunchArgs, LaunchShape, MemKind,
    PeakRates, ProgramId, Span, StreamId, Telemetry, WeightSetId,
};
use crate::graph::passes::OpSet;
use crate::graph::{Bucket, CompileError, Plan, Target, TpRank, Weight};
use crate::kv_cache::{BlockId, KvDType, KvGeometry};
use crate::weights::WeightSource;

/// The head size must be a multiple of this.
const HEAD_STEP: usize = 16;
/// Operations that every model needs.
const NEEDED: [&str; 9] = [
    "aclnnEmbedding",
    "aclnnRmsNorm",
    "aclnnMm",
    "aclnnRotaryPositionEmbedding",
    "aclnnIndexSelect",
    "aclnnCast",
    "aclnnAdd",
    "aclnnMul",
    "aclnnArgMax",
];

/// An Ascend NPU, or several for tensor parallelism. See the [module](super).
#[derive(Debug)]
pub struct AscendDevice {
    caps: DeviceCaps,
    library: PathBuf,
    activations: Activations,
    forms: (WeightForm, WeightTiles),
    workers: WorkerGroup,
    /// High bits of every id; ids of another device have other bits and are rejected.
    tag: u64,
    next: AtomicU64,
    /// Locked while the broadcast lock of the cards is held, never before it.
    known: Mutex<Registry>,
    /// Serializes the creation of streams, so that a stream has the same number on every card.
    making_stream: Mutex<()>,
    telemetry: CardTelemetry,
}

/// Ids returned to callers, with the facts that calls are checked against.
#[derive(Debug, Default)]
struct Registry {
    streams: u64,
    events: u64,
    buffers: HashMap<u64, (u64, MemKind)>,
    programs: HashMap<u64, Loaded>,
    layouts: HashMap<String, KvGeometry>,
}

/// Facts that a launch is checked against.
#[derive(Clone, Copy, Debug)]
struct Loaded {
    bucket: Bucket,
    vocab_size: usize,
    cache: KvShard,
}

fn invalid(what: impl Into<String>) -> DeviceError {
    DeviceError::Invalid { what: what.into() }
}

impl AscendDevice {
    /// Loads the runtime, binds a thread to each card and detects its capabilities.
    ///
    /// # Errors
    /// [`AscendOpenError`] names the missing library, function, operation or card, or the call that failed. No other
    /// device is tried.
    pub fn open(options: AscendOptions) -> Result<Arc<Self>, AscendOpenError> {
        static DEVICES: AtomicU64 = AtomicU64::new(1);
        let is_twice = |(at, card): (usize, &u32)| options.cards[..at].contains(card);
        if options.cards.is_empty() || options.cards.iter().enumerate().any(is_twice) {
            return Err(AscendOpenError::Cards { cards: options.cards });
        }
        let library = Arc::new(Library::open(options.library.as_deref())?);
        let runtime = Runtime::load(&library)?;
        let path = library.path().to_owned();
        let ops = Ops::load(&library, &runtime);
        let names: Vec<&'static str> = NEEDED.into_iter().filter(|name| !ops.has(name)).collect();
        if !names.is_empty() {
            return Err(AscendOpenError::MissingOperations { library: path, names });
        }
        let call = |source: AscendError| AscendOpenError::Call { card: options.cards[0], source };
        runtime.init().map_err(call)?;
        let count = runtime.device_count().map_err(call)?;
        if let Some(&card) = options.cards.iter().find(|&&card| card >= count) {
            return Err(AscendOpenError::Card { card, count });
        }
        let (cards, info) = WorkerGroup::open(&library, &runtime, &options)?;
        let caps = caps(&info, &options.cards, &path);
        let telemetry = CardTelemetry::new(options.dcmi_library, options.cards, Arc::clone(&cards.notes));
        Ok(Arc::new(Self {
            caps,
            library: path,
            activations: options.activations,
            forms: (options.weights, options.tiles),
            workers: cards,
            tag: (DEVICES.fetch_add(1, Ordering::Relaxed) | 1 << 20) << 40,
            next: AtomicU64::new(1),
            known: Mutex::default(),
            making_stream: Mutex::default(),
            telemetry,
        }))
    }

    /// Path of the loaded library.
    pub fn library(&self) -> &std::path::Path {
        &self.library
    }

    fn new_id(&self) -> u64 {
        self.tag | self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs calls of the runtime on one card's thread and waits for their result.
    fn attempt<R: Send + 'static>(
        &self,
        rank: usize,
        asked_bytes: u64,
        run: impl FnOnce(&mut Worker) -> Result<R, AscendError> + Send + 'static,
    ) -> Result<R, DeviceError> {
        self.workers.errors.check()?;
        self.merge_failure(self.workers.call(rank, move |card| card.attempt(asked_bytes, run))?)
    }

    /// Runs calls of the runtime on all cards at once; if one fails, `undo` is run on all.
    fn attempt_each(
        &self,
        asked_bytes: u64,
        run: impl Fn(&mut Worker) -> Result<(), AscendError> + Copy + Send + 'static,
        undo: impl Fn(&mut Worker) + Copy + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.workers.errors.check()?;
        let outcomes = self.workers.call_each(|_| move |card: &mut Worker| card.attempt(asked_bytes, run))?;
        let outcome = outcomes.into_iter().try_for_each(|outcome| self.merge_failure(outcome));
        if outcome.is_err() {
            self.each(undo);
        }
        outcome
    }

    /// Runs an infallible call on all cards. A device that has ended has freed everything already.
    fn each(&self, run: impl Fn(&mut Worker) + Copy + Send + 'static) {
        let _ = self.workers.call_each(|_| run);
    }

    /// Records a failure that ends the device.
    fn merge_failure<R>(&self, outcome: Result<R, DeviceError>) -> Result<R, DeviceError> {
        if let Err(error) = &outcome
            && error.is_lost()
        {
            self.workers.errors.note(error.clone());
        }
        outcome
    }

    /// Waits for the other cards after the first has answered: all answers are read, and the first failure counts.
    fn wait_for_others(&self, outcome: Result<(), DeviceError>) -> Result<(), DeviceError> {
        let others = self.workers.all_shared().skip(1);
        others.fold(outcome, |outcome, shared| outcome.and(shared.readback.wait(|_| ())))
    }

    fn index(&self, known: &Registry, on: StreamId) -> Result<usize, DeviceError> {
        let number = on.0.checked_sub(self.tag).filter(|number| (1..=known.streams).contains(number));
        let number = number.ok_or_else(|| invalid("unknown stream"))?;
        Ok(usize::try_from(number - 1).unwrap_or(0))
    }

    fn event(&self, known: &Registry, event: EventId) -> Result<u64, DeviceError> {
        let number = event.0.checked_sub(self.tag).filter(|number| (1..=known.events).contains(number));
        number.ok_or_else(|| invalid("unknown event"))
    }
}

impl Registry {
    fn check(&self, span: Span) -> Result<MemKind, DeviceError> {
        let (bytes, kind) = *self.buffers.get(&span.buffer.0).ok_or_else(|| invalid("unknown buffer"))?;
        if span.offset.checked_add(span.bytes).is_none_or(|end| end > bytes) {
            return Err(invalid(format!("span {span:?} is outside a buffer of {bytes} bytes")));
        }
        Ok(kind)
    }

    /// Checks the contract of a launch, as far as the host can.
    fn check_launch(&self, loaded: &Loaded, args: &LaunchArgs<'_>) -> Result<(), DeviceError> {
        let Loaded { bucket, vocab_size, cache } = *loaded;
        let LaunchShape { tokens, seqs, logit_rows, table_stride } = args.shape;
        let io = &args.io;
        let spans = [
            (io.token_ids, 4 * tokens),
            (io.positions, 4 * tokens),
            (io.block_tables, seqs.saturating_mul(table_stride).saturating_mul(4)),
            (io.logit_rows, 4 * logit_rows),
            (io.logits, logit_rows.saturating_mul(4 * vocab_size)),
            (io.argmax, 4 * logit_rows),
            (io.row_status, tokens),
        ];
        for (span, _) in spans.iter().chain(&[(io.kv_pool, 0)]) {
            if self.check(*span)? != MemKind::Device {
                return Err(invalid("a launch's buffers are device memory"));
            }
        }
        let keys = [
            io.token_ids,
            io.positions,
            io.block_tables,
            io.logit_rows,
            io.logits,
            io.argmax,
            io.row_status,
            io.kv_pool,
        ]
        .map(|span| span.buffer.0);
        let block_size = cache.geometry.block_size;
        let longest = args.kv_lens.iter().copied().max().unwrap_or(0) as usize;
        let blocks = cache.blocks(io.kv_pool.bytes) as u64;
        let lens = || args.q_lens.iter().zip(args.kv_lens);
        let rules = [
            ("eight different buffers", (1..keys.len()).all(|i| !keys[..i].contains(&keys[i]))),
            ("there is at least one row", tokens > 0),
            ("rows fit the bucket", tokens <= bucket.tokens && logit_rows <= bucket.logit_rows),
            ("sequences fit the bucket", seqs <= bucket.seqs),
            ("the longest sequence fits the bucket", longest <= bucket.kv_tokens),
            ("every sequence has its lengths", args.q_lens.len() == seqs && args.kv_lens.len() == seqs),
            ("each sequence has 1 to kv_len rows", lens().all(|(q, kv)| 1 <= *q && q <= kv)),
            ("row lengths add up", args.q_lens.iter().map(|&q| u64::from(q)).sum::<u64>() == tokens as u64),
            ("a block table has all blocks of its sequence", longest.div_ceil(block_size) <= table_stride),
            ("buffers have the length of the shape", spans.iter().all(|(span, bytes)| span.bytes == *bytes as u64)),
            ("buffers start at multiples of 32 bytes", spans.iter().all(|(span, _)| span.offset.is_multiple_of(32))),
            ("the pool has the device's own blocks after those of its callers", blocks > RESERVED_BLOCKS),
        ];
        match rules.iter().find(|(_, holds)| !holds) {
            Some((rule, _)) => Err(invalid(format!("launch: arguments do not satisfy the rule: {rule}"))),
            None => Ok(()),
        }
    }
}

fn caps(info: &[CardInfo], cards: &[u32], library: &std::path::Path) -> DeviceCaps {
    let mut target = Target::new(ALIGNMENT);
    (target.int8_activations, target.bf16_activations, target.attention_schedules) = (false, false, false);
    target.ops = OpSet::ALL.without(&["custom"]);
    let first = &info[0];
    let chip = first.chip.as_deref().unwrap_or("Ascend");
    let cann = first.cann.map_or("CANN before 8.5".to_owned(), |version| {
        format!("CANN {}.{}.{}", version / 10_000_000, version / 100_000 % 100, version / 1000 % 100)
    });
    let gib = first.total_bytes as f64 / f64::from(1 << 30);
    let cards_named = match cards {
        [card] => format!("card {card}, {gib:.1} GiB"),
        _ => format!("cards {cards:?}, {gib:.1} GiB each"),
    };
    let count = to_u32(cards.len());
    DeviceCaps {
        name: "ascend",
        description: format!("{chip}, {cards_named}, {cann}, {}", library.display()),
        target,
        kv_dtypes: vec![KvDType::F16, KvDType::BF16],
        block_size_step: 16,
        max_block_size: 1024,
        default_block_size: 128,
        static_shapes: true,
        batch_invariant: false,
        cards: count,
        max_ranks: count,
        retry_f32: false,
        clamps: false,
        unified_memory: false,
        default_pipeline_depth: 2,
        memory_bytes: info.iter().map(|card| card.free_bytes).min().filter(|bytes| *bytes > 0),
    }
}

impl Device for AscendDevice {
    fn caps(&self) -> &DeviceCaps {
        &self.caps
    }

    fn alloc(&self, bytes: u64, kind: MemKind) -> Result<BufferId, DeviceError> {
        let id = self.new_id();
        self.attempt_each(bytes, move |card| card.alloc(id, bytes, kind), move |card| card.free(id))?;
        self.known.lock().buffers.insert(id, (bytes, kind));
        Ok(BufferId(id))
    }

    fn free(&self, buffer: BufferId) {
        if self.known.lock().buffers.remove(&buffer.0).is_some() {
            self.each(move |card| card.free(buffer.0));
        }
    }

    fn write(&self, dst: Span, src: &[u8], on: StreamId) -> Result<(), DeviceError> {
        self.workers.errors.check()?;
        let on = {
            let known = self.known.lock();
            known.check(dst)?;
            self.index(&known, on)?
        };
        if dst.bytes != src.len() as u64 {
            return Err(invalid(format!("write of {} bytes into a span of {}", src.len(), dst.bytes)));
        }
        for (index, chunk) in src.chunks(SLOT_BYTES).enumerate() {
            let dst = Span { offset: dst.offset + (index * SLOT_BYTES) as u64, bytes: chunk.len() as u64, ..dst };
            self.workers.broadcast().try_push(|_, shared| {
                let mut slot = shared.free_slot()?;
                slot.as_mut_slice()[..chunk.len()].copy_from_slice(chunk);
                Some(Command::Write { dst, slot, bytes: chunk.len(), on })
            })?;
        }
        Ok(())
    }

    fn read(&self, src: Span, dst: &mut [u8], after: Option<EventId>) -> Result<(), DeviceError> {
        self.workers.errors.check()?;
        let after = {
            let known = self.known.lock();
            known.check(src)?;
            after.map(|event| self.event(&known, event)).transpose()?
        };
        if src.bytes != dst.len() as u64 {
            return Err(invalid(format!("read of a span of {} bytes into {}", src.bytes, dst.len())));
        }
        let first = self.workers.first();
        let _turn = first.readback.turn();
        // Size of one transfer, which fits the readback buffer.
        const PIECE: usize = 64 << 20;
        for (index, piece) in dst.chunks_mut(PIECE).enumerate() {
            let src = Span { offset: src.offset + (index * PIECE) as u64, bytes: piece.len() as u64, ..src };
            let answer = |rank: usize| match rank {
                0 => Command::Read { src, after },
                // Failures of the other cards must be read, and their slots freed.
                _ => Command::WaitHost { event: after },
            };
            self.workers.broadcast().push(|rank, _| answer(rank))?;
            let outcome = first.readback.wait(|readback| piece.copy_from_slice(&readback.as_slice()[..piece.len()]));
            self.wait_for_others(outcome)?;
        }
        if dst.is_empty() { self.workers.errors.take() } else { Ok(()) }
    }

    fn copy(&self, dst: Span, src: Span, on: StreamId) -> Result<(), DeviceError> {
        self.workers.errors.check()?;
        if dst.bytes != src.bytes {
            return Err(invalid(format!("copy of {} bytes into {}", src.bytes, dst.bytes)));
        }
        let on = {
            let known = self.known.lock();
            if (known.check(src)?, known.check(dst)?) == (MemKind::Pinned, MemKind::Pinned) {
                return Err(invalid("a copy between two pinned buffers"));
            }
            self.index(&known, on)?
        };
        self.workers.broadcast().push(|_, _| Command::Copy { dst, src, on })
    }

    fn copy_sampled_tokens(&self, ids: Span, best: Span, rows: &[(u32, u32)], on: StreamId) -> Result<(), DeviceError> {
        self.workers.errors.check()?;
        let on = {
            let known = self.known.lock();
            if (known.check(ids)?, known.check(best)?) != (MemKind::Device, MemKind::Device) {
                return Err(invalid("sampled tokens are copied within device memory"));
            }
            self.index(&known, on)?
        };
        let (to_words, from_words) = (ids.bytes / 4, best.bytes / 4);
        let is_inside = |(to, from): &&(u32, u32)| u64::from(*to) < to_words && u64::from(*from) < from_words;
        if let Some(pair) = rows.iter().find(|pair| !is_inside(pair)) {
            return Err(invalid(format!(
                "copy of sampled tokens {pair:?}: expected a row below {from_words} and an id below {to_words}"
            )));
        }
        self.workers.broadcast().push(|_, shared| {
            let mut list = shared.list();
            list.extend(rows.iter().map(|(to, _)| *to));
            list.extend(rows.iter().map(|(_, from)| *from));
            Command::Feed { ids, best, rows: list, on }
        })
    }

    fn stream(&self) -> Result<StreamId, DeviceError> {
        let _alone = self.making_stream.lock();
        let number = self.known.lock().streams;
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        self.attempt_each(0, move |card| card.exec.streams.add(index), |_| ())?;
        self.known.lock().streams = number + 1;
        Ok(StreamId(self.tag | (number + 1)))
    }

    fn record(&self, on: StreamId) -> Result<EventId, DeviceError> {
        self.workers.errors.check()?;
        let on = self.index(&self.known.lock(), on)?;
        // Numbers increase in queue order.
        let turn = self.workers.broadcast();
        let event = {
            let mut known = self.known.lock();
            known.events += 1;
            known.events
        };
        turn.push(|_, _| Command::Record { on, event })?;
        Ok(EventId(self.tag | event))
    }

    fn wait(&self, on: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.workers.errors.check()?;
        let (on, event) = {
            let known = self.known.lock();
            (self.index(&known, on)?, self.event(&known, event)?)
        };
        self.workers.broadcast().push(|_, _| Command::Wait { on, event })
    }

    fn wait_host(&self, event: EventId) -> Result<(), DeviceError> {
        self.workers.errors.check()?;
        let event = self.event(&self.known.lock(), event)?;
        let first = self.workers.first();
        let _turn = first.readback.turn();
        self.workers.broadcast().push(|_, _| Command::WaitHost { event: Some(event) })?;
        self.wait_for_others(first.readback.wait(|_| ()))
    }

    fn kv_layout(&self, geometry: &KvGeometry) -> Result<KvLayout, DeviceError> {
        // Keys and values of 2 bytes each.
        self.caps.check_geometry(geometry, 4)?;
        let KvGeometry { layers, kv_heads, head_dim, .. } = *geometry;
        if !head_dim.is_multiple_of(HEAD_STEP) {
            return Err(invalid(format!("heads of {head_dim} elements; the card takes multiples of {HEAD_STEP}")));
        }
        if kv_heads < self.workers.count() as usize {
            return Err(invalid(format!("no KV block has {layers} layers of {kv_heads} heads of {head_dim}")));
        }
        let layout = describe(*geometry, self.workers.count());
        self.known.lock().layouts.insert(layout.id.clone(), *geometry);
        Ok(layout)
    }

    fn kv_dtype(&self, weights: &[Weight]) -> Option<KvDType> {
        Some(kv_dtype(activation_elem(self.activations, weights)))
    }

    fn upload(&self, source: &dyn WeightSource, weights: &[Weight], rank: u32) -> Result<WeightSetId, DeviceError> {
        if rank >= self.workers.count() {
            return Err(invalid(format!("rank {rank} is out of range for {} cards", self.workers.count())));
        }
        let rank = rank as usize;
        let elem = activation_elem(self.activations, weights);
        let (asked, list) = (self.forms, weights.to_vec());
        let chosen = self.attempt(rank, 0, move |card| {
            let exec = &card.exec;
            layout::choose(&list, asked, elem, &exec.ops, exec.shared().scratch().flags, &exec.diagnostics)
        })?;
        let too_large = || invalid("the weights' sizes overflow");
        let (forms, sizes): (Vec<_>, Vec<_>) = chosen.ok_or_else(too_large)?.into_iter().unzip();
        let (places, bytes) = place(&sizes).ok_or_else(too_large)?;
        let buffer = self.attempt(rank, bytes as u64, move |card| {
            DeviceBuffer::new(&card.exec.context, padded(bytes), Pages::HugeFirst)
        })?;
        let id = self.new_id();
        let set = WeightSet::new(buffer, elem, weights, forms.iter().copied(), places);
        self.workers.call(rank, move |card| card.add_weights(id, set))?;
        let fill = |(index, (weight, form)): (usize, (&Weight, &layout::WeightLayout))| {
            pack(source, weight, *form, elem, &mut |stretch, at, bytes| {
                self.attempt(rank, bytes.len() as u64, move |card| match card.weights(id) {
                    Some(set) => set.write(index, stretch, at, &bytes),
                    None => Ok(()),
                })
            })?;
            self.attempt(rank, 0, move |card| match card.new_weights(id) {
                Some((set, exec)) => set.tile(index, exec),
                None => Ok(()),
            })
        };
        let filled = weights.iter().zip(&forms).enumerate().try_for_each(fill);
        if let Err(error) = filled {
            self.release_weights(WeightSetId(id));
            return Err(error);
        }
        Ok(WeightSetId(id))
    }

    fn release_weights(&self, weights: WeightSetId) {
        self.each(move |card| card.release_weights(weights.0));
    }

    fn load(&self, plans: &[Plan], weights: &[WeightSetId], kv: &KvGeometry) -> Result<ProgramId, CompileError> {
        plans.iter().try_for_each(Plan::check)?;
        let of = self.workers.count();
        if plans.len() != of as usize || weights.len() != plans.len() {
            let got = format!("got {} plans and {} weight sets for {of} cards", plans.len(), weights.len());
            return Err(CompileError::Invalid(got));
        }
        let in_order = (0..of).zip(plans).all(|(index, plan)| plan.rank == TpRank { index, of });
        if !in_order {
            return Err(CompileError::Invalid("expected the plans of all ranks, in rank order".into()));
        }
        self.kv_layout(kv).map_err(|error| CompileError::Invalid(error.to_string()))?;
        let failed = |error: DeviceError| CompileError::Device { reason: error.to_string() };
        self.workers.errors.check().map_err(failed)?;
        let (id, kv) = (self.new_id(), *kv);
        let first = &plans[0];
        let loaded = Loaded { bucket: first.bucket, vocab_size: first.vocab_size, cache: KvShard::largest(kv, of) };
        let outcomes = self.workers.call_each(|rank| {
            let (plan, set, cache) = (plans[rank].clone(), weights[rank].0, KvShard::for_rank(kv, plans[rank].rank));
            move |card: &mut Worker| {
                let set = card.weights(set).filter(|set| set.serves(&plan.weights));
                let set = set.ok_or_else(|| CompileError::Invalid("the weight set belongs to another plan".into()))?;
                let program = Program::load(&mut card.exec, &plan, set, cache)?;
                card.add_program(id, program);
                Ok(())
            }
        });
        let outcome: Result<(), CompileError> =
            outcomes.map_err(failed).and_then(|outcomes| outcomes.into_iter().collect());
        if outcome.is_err() {
            self.each(move |card| {
                card.unload(id);
                card.shrink();
            });
        }
        outcome?;
        self.known.lock().programs.insert(id, loaded);
        Ok(ProgramId(id))
    }

    fn overflows(&self, _program: ProgramId) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn custom_failures(&self, _program: ProgramId) -> Vec<CustomFailure> {
        Vec::new()
    }

    fn unload(&self, program: ProgramId) {
        if self.known.lock().programs.remove(&program.0).is_some() {
            self.each(move |card| card.unload(program.0));
        }
    }

    fn launch(&self, program: ProgramId, args: &LaunchArgs<'_>, on: StreamId) -> Result<(), DeviceError> {
        self.workers.errors.take()?;
        let on = {
            let known = self.known.lock();
            let loaded = known.programs.get(&program.0).ok_or_else(|| invalid("unknown program"))?;
            known.check_launch(loaded, args)?;
            self.index(&known, on)?
        };
        self.workers.broadcast().push(|_, shared| {
            let mut lens = shared.list();
            lens.extend_from_slice(args.q_lens);
            lens.extend_from_slice(args.kv_lens);
            Command::Launch { program: program.0, io: args.io, shape: args.shape, lens, on }
        })
    }

    fn copy_blocks(
        &self,
        layout: &KvLayout,
        src_pool: Span,
        dst_pool: Span,
        pairs: &[(BlockId, BlockId)],
        on: StreamId,
    ) -> Result<(), DeviceError> {
        self.workers.errors.check()?;
        let (geometry, on) = {
            let known = self.known.lock();
            let geometry =
                *known.layouts.get(&layout.id).ok_or_else(|| invalid(format!("unknown layout {}", layout.id)))?;
            if (known.check(src_pool)?, known.check(dst_pool)?) == (MemKind::Pinned, MemKind::Pinned) {
                return Err(invalid("a copy between two pinned pools"));
            }
            (geometry, self.index(&known, on)?)
        };
        let of = self.workers.count();
        let cache = KvShard::largest(geometry, of);
        let blocks = |pool: Span| (cache.blocks(pool.bytes) as u64).saturating_sub(RESERVED_BLOCKS);
        for (pool, block) in pairs.iter().flat_map(|(from, to)| [(src_pool, from), (dst_pool, to)]) {
            if u64::from(block.0) >= blocks(pool) {
                return Err(invalid(format!("block {} is outside the pool", block.0)));
            }
        }
        self.workers.broadcast().push(|rank, shared| {
            let mut list = shared.list();
            pairs_list(pairs, &mut list);
            let index = to_u32(rank);
            let cache = KvShard::for_rank(geometry, TpRank { index, of });
            Command::CopyBlocks { cache, src: src_pool, dst: dst_pool, pairs: list, on }
        })
    }

    fn telemetry(&self) -> Option<&dyn Telemetry> {
        Some(self)
    }
}

impl Telemetry for AscendDevice {
    fn notes(&self) -> Vec<String> {
        self.workers.notes.all()
    }

    fn peak_rates(&self) -> Option<PeakRates> {
        CardTelemetry::peak_rates(&self.caps.description, self.workers.count())
    }

    fn free_bytes(&self) -> Option<u64> {
        let of_cards = self.workers.call_each(|_| |card: &mut Worker| card.exec.context.memory_bytes()).ok()?;
        of_cards.into_iter().map(|bytes| bytes.map_or(0, |(free, _)| free)).min()
    }

    fn energy_uj(&self) -> Option<u64> {
        self.telemetry.energy_uj()
    }
}
