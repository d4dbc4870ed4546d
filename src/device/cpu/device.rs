//! [`Device`] implementation for the CPU: buffers are host memory, streams run inline, and a launch runs the plan on
//! the thread pool.

use crate::graph::NO_TOKEN;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::Isa;
use super::executor::launch::IoBytes;
use super::executor::{Poison, Program};
use super::kernels::kv_cache;
use super::measure::profile::StepTime;
use super::measure::rapl::PackageEnergy;
use super::memory::AlignedBytes;
use super::thread_pool::ThreadPool;
use super::weights::WeightSet;
use crate::device::{
    Bindings, BufferId, CustomFailure, Device, DeviceCaps, DeviceError, EventId, KvLayout, LaunchArgs, MemKind,
    PeakRates, ProgramId, Span, StreamId, Telemetry, WeightSetId,
};
use crate::graph::{CompileError, Plan, Target, Weight};
use crate::kv_cache::{BlockId, KvDType, KvGeometry};
use crate::weights::WeightSource;

/// Options of a [`CpuDevice`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuOptions {
    /// Number of worker threads, including the calling thread; `None` = the number of processors this process may use.
    pub threads: Option<usize>,
    /// Instruction-set path; `None` = the fastest this machine supports.
    pub isa: Option<Isa>,
    /// Whether to time each step of a plan; read the times with [`CpuDevice::take_profile`].
    pub profile: bool,
    /// Peak rates of the machine; `None` = measured on the first query, once per process, instruction-set path and
    /// number of threads. See [`Telemetry::peak_rates`](crate::device::Telemetry::peak_rates).
    pub peaks: Option<PeakRates>,
    /// Which parts of the arena are filled with NaN between steps; for tests of the memory plan.
    #[cfg(feature = "internals")]
    pub poison: Poison,
}

/// The CPU as a [`Device`].
#[derive(Debug)]
pub struct CpuDevice {
    caps: DeviceCaps,
    isa: Isa,
    poison: Poison,
    threads: ThreadPool,
    profile: bool,
    peaks: Option<PeakRates>,
    /// Energy meter, opened on the first query.
    energy: OnceLock<PackageEnergy>,
    /// High bits of every id; ids of another device have other bits and are rejected.
    tag: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Number of streams created so far; streams are never freed.
    streams: u64,
    /// Number of events recorded so far.
    events: u64,
    buffers: HashMap<u64, AlignedBytes>,
    weights: HashMap<u64, Arc<WeightSet>>,
    programs: HashMap<u64, Program>,
}

fn invalid(what: impl Into<String>) -> DeviceError {
    DeviceError::Invalid { what: what.into() }
}

impl CpuDevice {
    /// Creates the device and starts its thread pool.
    ///
    /// # Errors
    /// [`DeviceError`] if the machine does not support `isa`, or if the threads cannot be started.
    pub fn new(options: CpuOptions) -> Result<Self, DeviceError> {
        static DEVICES: AtomicU64 = AtomicU64::new(1);
        let isa = match options.isa {
            None => Isa::detect(),
            Some(isa) if isa.is_available() => isa,
            Some(isa) => return Err(invalid(format!("instruction set {isa:?} is not available on this processor"))),
        };
        let threads = ThreadPool::new(options.threads)?;
        let mut target = Target::new(128);
        target.bf16_activations = isa == Isa::Avx512Bf16;
        let caps = DeviceCaps {
            name: "cpu",
            description: format!("{}, {isa:?}, {} threads", std::env::consts::ARCH, threads.count()),
            target,
            kv_dtypes: vec![KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::I8],
            block_size_step: 16,
            max_block_size: 1024,
            default_block_size: 16,
            static_shapes: false,
            unified_memory: true,
            // A launch is complete when the call returns, so a second step in flight would gain nothing.
            default_pipeline_depth: 1,
            batch_invariant: true,
            cards: 1,
            max_ranks: 16,
            retry_f32: true,
            clamps: true,
            memory_bytes: Some(super::memory::available_bytes()).filter(|bytes| *bytes > 0),
        };
        let tag = DEVICES.fetch_add(1, Ordering::Relaxed) << 40;
        let CpuOptions { profile, peaks, .. } = options;
        #[cfg(feature = "internals")]
        let poison = options.poison;
        #[cfg(not(feature = "internals"))]
        let poison = Poison::default();
        let energy = OnceLock::new();
        Ok(Self { caps, isa, poison, threads, profile, peaks, energy, tag, state: Mutex::default() })
    }

    /// Number of worker threads, including the calling thread.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// Instruction-set path in use.
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Time of each executed step of this plan since the last call. Empty if the device was created without
    /// [`CpuOptions::profile`] or does not own the program.
    pub fn take_profile(&self, program: ProgramId) -> Vec<StepTime> {
        self.state.lock().programs.get_mut(&program.0).map_or(Vec::new(), Program::take_profile)
    }

    fn new_id(&self, state: &mut State) -> u64 {
        state.next += 1;
        self.tag | state.next
    }

    /// Locks the state after checking that `stream` belongs to this device.
    fn on(&self, stream: StreamId) -> Result<MutexGuard<'_, State>, DeviceError> {
        let state = self.state.lock();
        self.known(stream.0, state.streams, "stream")?;
        Ok(state)
    }

    /// Checks an id. Streams and events are numbered from 1 without gaps, so a count is enough.
    fn known(&self, id: u64, count: u64, what: &str) -> Result<(), DeviceError> {
        if id.checked_sub(self.tag).is_some_and(|number| (1..=count).contains(&number)) {
            return Ok(());
        }
        Err(invalid(format!("unknown {what}")))
    }

    /// Layout of keys and values for the geometry.
    fn layout(&self, geometry: &KvGeometry) -> Result<kv_cache::CpuKvLayout, DeviceError> {
        // At most 4 times the head size for two values of up to 2 bytes each, or 8 times for a single int8 head with
        // scale and padding; 16 is a safe bound.
        self.caps.check_geometry(geometry, 16)?;
        Ok(kv_cache::CpuKvLayout::new(*geometry))
    }
}

impl State {
    fn bytes(&self, span: Span) -> Result<&[u8], DeviceError> {
        let buffer = self.buffers.get(&span.buffer.0).ok_or_else(|| invalid("unknown buffer"))?;
        let range = range_of(span, buffer.len())?;
        Ok(&buffer.as_slice()[range])
    }

    fn bytes_mut(&mut self, span: Span) -> Result<&mut [u8], DeviceError> {
        let buffer = self.buffers.get_mut(&span.buffer.0).ok_or_else(|| invalid("unknown buffer"))?;
        let range = range_of(span, buffer.len())?;
        Ok(&mut buffer.as_mut_slice()[range])
    }
}

#[allow(clippy::cast_possible_truncation)] // both ends are at most `len`
fn range_of(span: Span, len: usize) -> Result<std::ops::Range<usize>, DeviceError> {
    let end = span.offset.checked_add(span.bytes).filter(|end| *end <= len as u64);
    let end = end.ok_or_else(|| invalid(format!("span {span:?} is outside a buffer of {len} bytes")))?;
    Ok(span.offset as usize..end as usize)
}

impl Device for CpuDevice {
    fn caps(&self) -> &DeviceCaps {
        &self.caps
    }

    fn alloc(&self, bytes: u64, _kind: MemKind) -> Result<BufferId, DeviceError> {
        let buffer = AlignedBytes::zeroed(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let state = &mut *self.state.lock();
        let id = self.new_id(state);
        state.buffers.insert(id, buffer);
        Ok(BufferId(id))
    }

    fn free(&self, buffer: BufferId) {
        self.state.lock().buffers.remove(&buffer.0);
    }

    fn write(&self, dst: Span, src: &[u8], on: StreamId) -> Result<(), DeviceError> {
        let state = &mut *self.on(on)?;
        let dst = state.bytes_mut(dst)?;
        if dst.len() != src.len() {
            return Err(invalid(format!("write of {} bytes into a span of {}", src.len(), dst.len())));
        }
        dst.copy_from_slice(src);
        Ok(())
    }

    fn read(&self, src: Span, dst: &mut [u8], after: Option<EventId>) -> Result<(), DeviceError> {
        let state = self.state.lock();
        after.map_or(Ok(()), |event| self.known(event.0, state.events, "event"))?;
        let src = state.bytes(src)?;
        if dst.len() != src.len() {
            return Err(invalid(format!("read of a span of {} bytes into {}", src.len(), dst.len())));
        }
        dst.copy_from_slice(src);
        Ok(())
    }

    fn copy(&self, dst: Span, src: Span, on: StreamId) -> Result<(), DeviceError> {
        let state = &mut *self.on(on)?;
        if dst.bytes != src.bytes {
            return Err(invalid(format!("copy of {} bytes into {}", src.bytes, dst.bytes)));
        }
        state.bytes(src)?;
        state.bytes(dst)?;
        copy_between(&mut state.buffers, dst.buffer, src.buffer, (src.offset, dst.offset), src.bytes)
    }

    fn copy_sampled_tokens(&self, ids: Span, best: Span, rows: &[(u32, u32)], on: StreamId) -> Result<(), DeviceError> {
        let state = &mut *self.on(on)?;
        let words = |span: Span| Ok::<_, DeviceError>(state.bytes(span)?.len() as u64 / 4);
        let (to_words, from_words) = (words(ids)?, words(best)?);
        if let Some(pair) = rows.iter().find(|(to, from)| u64::from(*to) >= to_words || u64::from(*from) >= from_words)
        {
            return Err(invalid(format!(
                "copy of sampled tokens {pair:?}: expected a row below {from_words} and an id below {to_words}"
            )));
        }
        let word = |span: Span, index: u32| Span { offset: span.offset + 4 * u64::from(index), bytes: 4, ..span };
        for &(to, from) in rows {
            let mut token = [0; 4];
            token.copy_from_slice(state.bytes(word(best, from))?);
            if token == NO_TOKEN.to_ne_bytes() {
                // The row's result is undefined and must be ignored, but its id must be a valid token.
                token = [0; 4];
            }
            state.bytes_mut(word(ids, to))?.copy_from_slice(&token);
        }
        Ok(())
    }

    fn stream(&self) -> Result<StreamId, DeviceError> {
        let state = &mut *self.state.lock();
        state.streams += 1;
        Ok(StreamId(self.tag | state.streams))
    }

    fn record(&self, on: StreamId) -> Result<EventId, DeviceError> {
        let state = &mut *self.on(on)?;
        state.events += 1;
        Ok(EventId(self.tag | state.events))
    }

    // Streams run inline: an event that exists has already completed.
    fn wait(&self, on: StreamId, event: EventId) -> Result<(), DeviceError> {
        let state = self.on(on)?;
        self.known(event.0, state.events, "event")
    }

    fn wait_host(&self, event: EventId) -> Result<(), DeviceError> {
        self.known(event.0, self.state.lock().events, "event")
    }

    fn kv_layout(&self, geometry: &KvGeometry) -> Result<KvLayout, DeviceError> {
        let layout = self.layout(geometry)?;
        let KvGeometry { layers, kv_heads, head_dim, block_size, dtype } = *geometry;
        let id = format!("cpu-tile16-{dtype:?}-l{layers}-h{kv_heads}-d{head_dim}-b{block_size}");
        Ok(KvLayout { id, bytes_per_block: layout.bytes_per_block() as u64, alignment: 64, reserved_blocks: 0 })
    }

    fn upload(&self, source: &dyn WeightSource, weights: &[Weight], _rank: u32) -> Result<WeightSetId, DeviceError> {
        let set = WeightSet::pack(&self.threads, source, weights)?;
        let state = &mut *self.state.lock();
        let id = self.new_id(state);
        state.weights.insert(id, Arc::new(set));
        Ok(WeightSetId(id))
    }

    fn release_weights(&self, weights: WeightSetId) {
        self.state.lock().weights.remove(&weights.0);
    }

    fn load(&self, plans: &[Plan], weights: &[WeightSetId], kv: &KvGeometry) -> Result<ProgramId, CompileError> {
        plans.iter().try_for_each(Plan::check)?;
        let layout = self.layout(kv).map_err(|error| CompileError::Invalid(error.to_string()))?;
        let state = &mut *self.state.lock();
        let set = |id: &WeightSetId| {
            let unknown = || CompileError::Invalid("unknown weight set".into());
            state.weights.get(&id.0).map(Arc::clone).ok_or_else(unknown)
        };
        let sets = weights.iter().map(set).collect::<Result<Vec<_>, _>>()?;
        let program = Program::new(
            plans,
            sets,
            layout,
            (self.threads.parts(), self.threads.parts() / self.threads.count()),
            self.poison,
        )?
        .timed(self.profile);
        let id = self.new_id(state);
        state.programs.insert(id, program);
        Ok(ProgramId(id))
    }

    fn overflows(&self, program: ProgramId) -> Vec<(&'static str, u64)> {
        self.state.lock().programs.get(&program.0).map_or(Vec::new(), Program::overflows)
    }

    fn custom_failures(&self, program: ProgramId) -> Vec<CustomFailure> {
        self.state.lock().programs.get(&program.0).map_or(Vec::new(), Program::custom_failures)
    }

    fn unload(&self, program: ProgramId) {
        self.state.lock().programs.remove(&program.0);
    }

    fn launch(&self, program: ProgramId, args: &LaunchArgs<'_>, on: StreamId) -> Result<(), DeviceError> {
        let State { buffers, programs, .. } = &mut *self.on(on)?;
        let program = programs.get_mut(&program.0).ok_or_else(|| invalid("unknown program"))?;
        let Bindings { token_ids, positions, block_tables, logit_rows, logits, argmax: best, row_status, kv_pool } =
            args.io;
        let spans = [token_ids, positions, block_tables, logit_rows, logits, best, row_status, kv_pool];
        let keys = spans.map(|span| span.buffer.0);
        if (1..keys.len()).any(|i| keys[..i].contains(&keys[i])) {
            return Err(invalid("two bindings name the same buffer"));
        }
        let mut bound =
            buffers.get_disjoint_mut([&keys[0], &keys[1], &keys[2], &keys[3], &keys[4], &keys[5], &keys[6], &keys[7]]);
        let mut slices: [&mut [u8]; 8] = Default::default();
        for ((slice, buffer), span) in slices.iter_mut().zip(&mut bound).zip(spans) {
            let buffer = buffer.take().ok_or_else(|| invalid("unknown buffer"))?;
            let range = range_of(span, buffer.len())?;
            *slice = &mut buffer.as_mut_slice()[range];
        }
        let [token_ids, positions, block_tables, logit_rows, logits, best, row_status, kv_pool] = slices;
        let io = IoBytes {
            token_ids: words(token_ids)?,
            positions: words(positions)?,
            block_tables: words(block_tables)?,
            logit_rows: words(logit_rows)?,
            logits: aligned(logits)?,
            best: aligned(best)?,
            row_status,
            kv_pool,
        };
        program.launch(&self.threads, self.isa, args, io)
    }

    fn copy_blocks(
        &self,
        layout: &KvLayout,
        src_pool: Span,
        dst_pool: Span,
        pairs: &[(BlockId, BlockId)],
        on: StreamId,
    ) -> Result<(), DeviceError> {
        let state = &mut *self.on(on)?;
        let bytes = layout.bytes_per_block;
        state.bytes(src_pool)?;
        state.bytes(dst_pool)?;
        let offset = |pool: Span, block: BlockId| {
            let end = bytes.checked_mul(u64::from(block.0) + 1).filter(|end| *end <= pool.bytes);
            let end = end.ok_or_else(|| invalid(format!("block {} is outside the pool", block.0)))?;
            Ok(pool.offset + end - bytes)
        };
        // Validate all pairs before anything moves, so that a failing call changes nothing.
        for &(from, to) in pairs {
            offset(src_pool, from)?;
            offset(dst_pool, to)?;
        }
        for &(from, to) in pairs {
            let places = (offset(src_pool, from)?, offset(dst_pool, to)?);
            copy_between(&mut state.buffers, dst_pool.buffer, src_pool.buffer, places, bytes)?;
        }
        Ok(())
    }

    fn telemetry(&self) -> Option<&dyn Telemetry> {
        Some(self)
    }
}

impl Telemetry for CpuDevice {
    fn peak_rates(&self) -> Option<PeakRates> {
        // The measurement fails only if its buffers cannot be allocated; the rates are then unknown.
        self.peaks.or_else(|| super::measure::peak_rates::peak_rates(&self.threads, self.isa).ok())
    }

    fn energy_uj(&self) -> Option<u64> {
        self.energy.get_or_init(PackageEnergy::from_system).used_uj()
    }
}

/// Returns `bytes` if they can be viewed as 32-bit words.
fn aligned(bytes: &mut [u8]) -> Result<&mut [u8], DeviceError> {
    let sound = bytemuck::try_cast_slice_mut::<u8, u32>(bytes).is_ok();
    if sound { Ok(bytes) } else { Err(invalid("a buffer of words is unaligned or of odd length")) }
}

fn words(bytes: &[u8]) -> Result<&[u32], DeviceError> {
    bytemuck::try_cast_slice(bytes).map_err(|_| invalid("a buffer of u32 is unaligned or of odd length"))
}

/// Copies `bytes` bytes from the first to the second offset; both ranges may overlap.
fn copy_between(
    buffers: &mut HashMap<u64, AlignedBytes>,
    dst: BufferId,
    src: BufferId,
    (from, to): (u64, u64),
    bytes: u64,
) -> Result<(), DeviceError> {
    let checked = |buffer: BufferId, offset: u64, len: usize| range_of(Span { buffer, offset, bytes }, len);
    if dst == src {
        let buffer = buffers.get_mut(&dst.0).ok_or_else(|| invalid("unknown buffer"))?;
        let (from, to) = (checked(src, from, buffer.len())?, checked(dst, to, buffer.len())?);
        buffer.as_mut_slice().copy_within(from, to.start);
    } else {
        let [Some(src_bytes), Some(dst_bytes)] = buffers.get_disjoint_mut([&src.0, &dst.0]) else {
            return Err(invalid("unknown buffer"));
        };
        let (from, to) = (checked(src, from, src_bytes.len())?, checked(dst, to, dst_bytes.len())?);
        dst_bytes.as_mut_slice()[to].copy_from_slice(&src_bytes.as_slice()[from]);
    }
    Ok(())
}
