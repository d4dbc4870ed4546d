//! Device that defers all work: the CPU device, with queues that run only when the host waits, and only as far as
//! needed.
//!
//! Events are the only synchronization between streams. If a stream does not wait for an event of another stream, their
//! order is not guaranteed: a launch without an event after the write of its inputs on another stream reads the old
//! inputs. The device panics if a caller frees a buffer that queued work still uses, which would otherwise go
//! unnoticed. On request, one call fails.
#![allow(dead_code)] // each test binary uses only a part

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::device::{
    Bindings, BufferId, CustomFailure, Device, DeviceCaps, DeviceError, EventId, KvLayout, LaunchArgs, LaunchShape,
    MemKind, ProgramId, Span, StreamId, WeightSetId,
};
use ascend_llm::graph::{CompileError, Plan, Weight};
use ascend_llm::kv_cache::{BlockId, KvGeometry};
use ascend_llm::weights::WeightSource;
use parking_lot::Mutex;

enum Work {
    Write { dst: Span, data: Vec<u8> },
    Copy { dst: Span, src: Span },
    CopyTokens { ids: Span, argmax: Span, rows: Vec<(u32, u32)> },
    Launch { program: ProgramId, io: Bindings, shape: LaunchShape, q_lens: Vec<u32>, kv_lens: Vec<u32> },
    CopyBlocks { layout: KvLayout, src: Span, dst: Span, pairs: Vec<(BlockId, BlockId)> },
    Record(EventId),
    Wait(EventId),
}

impl Work {
    fn uses(&self, buffer: BufferId) -> bool {
        let is = |span: &Span| span.buffer == buffer;
        match self {
            Self::Write { dst, .. } => is(dst),
            Self::Copy { dst, src } | Self::CopyBlocks { src, dst, .. } => is(dst) || is(src),
            Self::CopyTokens { ids, argmax, .. } => is(ids) || is(argmax),
            Self::Launch { io, .. } => {
                let ins = [io.token_ids, io.positions, io.block_tables, io.logit_rows];
                ins.iter().chain(&[io.logits, io.argmax, io.row_status, io.kv_pool]).any(is)
            }
            Self::Record(_) | Self::Wait(_) => false,
        }
    }
}

#[derive(Default)]
struct Queues {
    /// Streams and their queues, in order of creation.
    streams: Vec<(StreamId, VecDeque<Work>)>,
    events: u64,
    reached: Vec<bool>,
    /// Number of queued launches.
    pub launched: u64,
    pub most_launched: u64,
}

/// Device that defers all work; see the module documentation.
pub struct DeferredDevice {
    cpu: CpuDevice,
    caps: DeviceCaps,
    queues: Mutex<Queues>,
    calls: AtomicU64,
    /// Number of the call that fails, counted from 1; 0 for none.
    fails_at: AtomicU64,
    /// Number of host waits and reads since the start.
    host_waits: AtomicU64,
    /// Number of launches until one yields a non-finite row of logits with a good row status; 0 for never.
    corrupts_in: AtomicU64,
    /// Index of that row of logits.
    corrupted_row: AtomicU64,
}

impl std::fmt::Debug for DeferredDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LateDevice").finish_non_exhaustive()
    }
}

fn invalid(what: &str) -> DeviceError {
    DeviceError::Invalid { what: what.to_owned() }
}

impl DeferredDevice {
    pub fn new() -> Arc<Self> {
        let mut options = CpuOptions::default();
        options.threads = Some(1);
        let cpu = CpuDevice::new(options).unwrap();
        let mut caps = cpu.caps().clone();
        (caps.unified_memory, caps.default_pipeline_depth) = (false, 2);
        Arc::new(Self {
            cpu,
            caps,
            queues: Mutex::default(),
            calls: AtomicU64::new(0),
            fails_at: AtomicU64::new(0),
            host_waits: AtomicU64::new(0),
            corrupts_in: AtomicU64::new(0),
            corrupted_row: AtomicU64::new(0),
        })
    }

    /// Makes the `call`-th call from now on fail, and no later one; 0 disables the failure.
    pub fn fail_at(&self, call: u64) {
        self.calls.store(0, Ordering::Relaxed);
        self.fails_at.store(call, Ordering::Relaxed);
    }

    /// Makes row `row` of logits of the `launch`-th launch from now on contain a NaN and have no argmax.
    ///
    /// The status of the row does not report it.
    pub fn corrupt(&self, launch: u64, row: u64) {
        self.corrupts_in.store(launch, Ordering::Relaxed);
        self.corrupted_row.store(row, Ordering::Relaxed);
    }

    /// Returns whether a launch is still to be corrupted.
    pub fn will_corrupt(&self) -> bool {
        self.corrupts_in.load(Ordering::Relaxed) > 0
    }

    fn corrupt_launched(&self, io: &Bindings, rows: usize, on: StreamId) -> Result<(), DeviceError> {
        let left = self.corrupts_in.load(Ordering::Relaxed);
        let row = self.corrupted_row.load(Ordering::Relaxed);
        if left == 0 || (left == 1 && row >= rows as u64) {
            return Ok(());
        }
        self.corrupts_in.store(left - 1, Ordering::Relaxed);
        if left > 1 {
            return Ok(());
        }
        let line = io.logits.bytes / rows as u64;
        let word = |span: Span, offset: u64| Span { offset: span.offset + offset, bytes: 4, ..span };
        self.cpu.write(word(io.argmax, 4 * row), &u32::MAX.to_le_bytes(), on)?;
        self.cpu.write(word(io.logits, line * row + 4 * 5), &f32::NAN.to_le_bytes(), on)
    }

    /// Returns the number of fallible calls since the last [`fail_at`](Self::fail_at).
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    pub fn host_waits(&self) -> u64 {
        self.host_waits.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of launches that were queued at the same time.
    pub fn most_launched(&self) -> u64 {
        self.queues.lock().most_launched
    }

    /// Returns whether the queues contain only records of events and waits for them.
    pub fn is_drained(&self) -> bool {
        let queues = self.queues.lock();
        let idle = |work: &Work| matches!(work, Work::Record(_) | Work::Wait(_));
        queues.streams.iter().all(|(_, queue)| queue.iter().all(idle))
    }

    fn call(&self) -> Result<(), DeviceError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if call == self.fails_at.load(Ordering::Relaxed) {
            return Err(DeviceError::Call { call: "late", code: 507_011, message: "injected failure".to_owned() });
        }
        Ok(())
    }

    fn push(&self, on: StreamId, work: Work) -> Result<(), DeviceError> {
        let mut queues = self.queues.lock();
        if matches!(work, Work::Launch { .. }) {
            queues.launched += 1;
            queues.most_launched = queues.most_launched.max(queues.launched);
        }
        let queue = queues.streams.iter_mut().find(|(id, _)| *id == on).ok_or_else(|| invalid("unknown stream"))?;
        queue.1.push_back(work);
        Ok(())
    }

    /// Runs only the work that must run before this event is reached.
    fn reach(&self, queues: &mut Queues, event: EventId) -> Result<(), DeviceError> {
        let place = usize::try_from(event.0 - 1).unwrap();
        if queues.reached.get(place).copied().unwrap_or(true) {
            return Ok(());
        }
        let holds = |queue: &VecDeque<Work>| queue.iter().any(|work| matches!(work, Work::Record(id) if *id == event));
        let stream = queues
            .streams
            .iter()
            .position(|(_, queue)| holds(queue))
            .expect("a stream contains the record of the event");
        while !queues.reached[place] {
            let work = queues.streams[stream].1.pop_front().expect("the event comes after this work in the queue");
            self.run(queues, work)?;
        }
        Ok(())
    }

    fn run(&self, queues: &mut Queues, work: Work) -> Result<(), DeviceError> {
        let inline = queues.streams[0].0;
        match work {
            Work::Write { dst, data } => self.cpu.write(dst, &data, inline),
            Work::Copy { dst, src } => self.cpu.copy(dst, src, inline),
            Work::CopyTokens { ids, argmax, rows } => self.cpu.copy_sampled_tokens(ids, argmax, &rows, inline),
            Work::Launch { program, io, shape, q_lens, kv_lens } => {
                queues.launched -= 1;
                self.cpu.launch(program, &LaunchArgs::new(io, shape, &q_lens, &kv_lens), inline)?;
                self.corrupt_launched(&io, shape.logit_rows, inline)
            }
            Work::CopyBlocks { layout, src, dst, pairs } => self.cpu.copy_blocks(&layout, src, dst, &pairs, inline),
            Work::Record(event) => {
                queues.reached[usize::try_from(event.0 - 1).unwrap()] = true;
                Ok(())
            }
            Work::Wait(event) => self.reach(queues, event),
        }
    }

    fn run_all(&self) -> Result<(), DeviceError> {
        let mut queues = self.queues.lock();
        for stream in 0..queues.streams.len() {
            while let Some(work) = queues.streams[stream].1.pop_front() {
                self.run(&mut queues, work)?;
            }
        }
        Ok(())
    }
}

impl Device for DeferredDevice {
    fn caps(&self) -> &DeviceCaps {
        &self.caps
    }
    fn alloc(&self, bytes: u64, kind: MemKind) -> Result<BufferId, DeviceError> {
        self.cpu.alloc(bytes, kind)
    }
    fn free(&self, buffer: BufferId) {
        let queues = self.queues.lock();
        let queued = queues.streams.iter().any(|(_, queue)| queue.iter().any(|work| work.uses(buffer)));
        assert!(!queued, "{buffer:?} is freed while queued work uses it");
        self.cpu.free(buffer);
    }
    fn write(&self, dst: Span, src: &[u8], on: StreamId) -> Result<(), DeviceError> {
        self.call()?;
        self.push(on, Work::Write { dst, data: src.to_vec() })
    }
    fn read(&self, src: Span, dst: &mut [u8], after: Option<EventId>) -> Result<(), DeviceError> {
        self.call()?;
        self.host_waits.fetch_add(1, Ordering::Relaxed);
        match after {
            Some(event) => self.reach(&mut self.queues.lock(), event)?,
            None => self.run_all()?,
        }
        self.cpu.read(src, dst, None)
    }
    fn copy(&self, dst: Span, src: Span, on: StreamId) -> Result<(), DeviceError> {
        self.call()?;
        self.push(on, Work::Copy { dst, src })
    }
    fn copy_sampled_tokens(
        &self,
        ids: Span,
        argmax: Span,
        rows: &[(u32, u32)],
        on: StreamId,
    ) -> Result<(), DeviceError> {
        self.call()?;
        self.push(on, Work::CopyTokens { ids, argmax, rows: rows.to_vec() })
    }
    fn stream(&self) -> Result<StreamId, DeviceError> {
        let id = self.cpu.stream()?;
        self.queues.lock().streams.push((id, VecDeque::new()));
        Ok(id)
    }
    fn record(&self, on: StreamId) -> Result<EventId, DeviceError> {
        self.call()?;
        let event = {
            let mut queues = self.queues.lock();
            queues.events += 1;
            queues.reached.push(false);
            EventId(queues.events)
        };
        self.push(on, Work::Record(event))?;
        Ok(event)
    }
    fn wait(&self, on: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.call()?;
        self.push(on, Work::Wait(event))
    }
    fn wait_host(&self, event: EventId) -> Result<(), DeviceError> {
        self.call()?;
        self.host_waits.fetch_add(1, Ordering::Relaxed);
        self.reach(&mut self.queues.lock(), event)
    }
    fn kv_layout(&self, geometry: &KvGeometry) -> Result<KvLayout, DeviceError> {
        self.cpu.kv_layout(geometry)
    }
    fn upload(&self, source: &dyn WeightSource, weights: &[Weight], rank: u32) -> Result<WeightSetId, DeviceError> {
        self.cpu.upload(source, weights, rank)
    }
    fn release_weights(&self, weights: WeightSetId) {
        self.cpu.release_weights(weights);
    }
    fn load(&self, plans: &[Plan], weights: &[WeightSetId], kv: &KvGeometry) -> Result<ProgramId, CompileError> {
        self.cpu.load(plans, weights, kv)
    }
    fn overflows(&self, program: ProgramId) -> Vec<(&'static str, u64)> {
        self.cpu.overflows(program)
    }
    fn custom_failures(&self, program: ProgramId) -> Vec<CustomFailure> {
        // The failures are complete only after all queued work has run.
        let _ = self.run_all();
        self.cpu.custom_failures(program)
    }
    fn unload(&self, program: ProgramId) {
        self.cpu.unload(program);
    }
    fn launch(&self, program: ProgramId, args: &LaunchArgs<'_>, on: StreamId) -> Result<(), DeviceError> {
        self.call()?;
        let LaunchArgs { io, shape, q_lens, kv_lens, .. } = *args;
        let (q_lens, kv_lens) = (q_lens.to_vec(), kv_lens.to_vec());
        self.push(on, Work::Launch { program, io, shape, q_lens, kv_lens })
    }
    fn copy_blocks(
        &self,
        layout: &KvLayout,
        src: Span,
        dst: Span,
        pairs: &[(BlockId, BlockId)],
        on: StreamId,
    ) -> Result<(), DeviceError> {
        self.call()?;
        self.push(on, Work::CopyBlocks { layout: layout.clone(), src, dst, pairs: pairs.to_vec() })
    }
}
