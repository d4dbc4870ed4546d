//! Graph capture of decode steps: one graph per bucket, with attention updated layer by layer during the replay.
//!
//! A graph is captured when its bucket is first used by a batch of sequences with one row each. Its buffers belong to
//! the program, so a replay needs no addresses. The lengths of attention are host values, so its calls are task groups
//! that an update stream issues again, each ordered against the replay by an external event. The first replay waits for
//! its updates to be accepted, so that a driver without support for updates is detected before work depends on them.

#![forbid(unsafe_code)]

use crate::num::to_u32;
use std::sync::Arc;

use ascend_sys::{
    AscendError, AscendErrorKind, Capture, CaptureMode, DeviceAddress, DeviceBuffer, Event, EventKind, Graph, Op,
    Stream, TaskGroup, TaskUpdate,
};

use super::context::{ExecContext, Shared};
use super::lower::{LoweredOp, OutputBuffers, RowCounts};
use super::{Batch, Program};
use crate::device::ascend::memory::{RegionBuilder, TypedAddress, alloc_zeroed};
use crate::graph::AttentionShape;

/// Capture state of a bucket.
#[derive(Debug, Default)]
pub(crate) enum Captured {
    /// Not captured yet.
    #[default]
    NotYet,
    /// Not available; the device's notes give the reason.
    Never,
    Ready(Box<Replay>),
}

/// A graph with its update handles and buffers.
#[derive(Debug)]
pub(crate) struct Replay {
    graph: Graph,
    layers: Vec<Refreshed>,
    is_proven: bool,
    /// End of the last replay; its attention must not be updated before.
    done: Event,
    pool: (DeviceAddress, u64),
    results: OutputBuffers,
    /// Indices after the batch's rows, for unused rows of logits.
    padding: DeviceAddress,
    shared: Arc<Shared>,
    _region: DeviceBuffer,
}

/// One layer's attention in a graph, with the handle to update it.
#[derive(Debug)]
struct Refreshed {
    group: TaskGroup,
    event: Event,
    shape: AttentionShape,
    query: TypedAddress,
    out: TypedAddress,
}

/// Whether a failed capture leaves the device as it was.
fn is_harmless(error: &AscendError) -> bool {
    matches!(
        error.kind,
        AscendErrorKind::Capture
            | AscendErrorKind::ResourceExhausted
            | AscendErrorKind::Unsupported
            | AscendErrorKind::Refused
            | AscendErrorKind::OutOfMemory
    )
}

/// Reason why this installation cannot capture graphs; `None` if it can.
pub(crate) fn missing(exec: &ExecContext) -> Option<&'static str> {
    let capabilities = exec.context.runtime().capabilities();
    match (capabilities.capture, capabilities.task_update) {
        (false, _) => Some("this CANN version cannot capture streams (8.1 and later can)"),
        (_, false) => Some("this CANN version cannot update tasks of captured graphs"),
        _ => None,
    }
}

impl Program {
    /// Whether a graph can run this batch.
    pub(crate) fn can_replay(&self, batch: &Batch<'_>, most_rows: usize) -> bool {
        let rows = self.sizes.tokens;
        rows <= most_rows
            && self.sizes.seqs == rows
            && self.sizes.logits == rows
            && batch.shape.seqs == batch.shape.tokens
            && batch.shape.logit_rows > 0
            // Each padding row has its own slot in the reserved block.
            && rows - batch.shape.tokens <= self.cache.geometry.block_size
    }

    /// Queues one batch as a replay; returns `false` if there is no graph and none can be captured.
    pub(crate) fn replay(&mut self, exec: &mut ExecContext, batch: &Batch<'_>, on: usize) -> Result<bool, AscendError> {
        let pool = (batch.pool, batch.pool_bytes);
        if let Captured::Ready(replay) = &self.captured
            && replay.pool != pool
        {
            exec.synchronize()?;
            self.captured = Captured::NotYet;
        }
        if matches!(self.captured, Captured::NotYet) {
            let captured = self.capture(exec, pool, on);
            self.captured = self.resolve(exec, captured.map(|replay| Captured::Ready(Box::new(replay))))?;
        }
        if matches!(self.captured, Captured::Never) {
            return Ok(false);
        }
        self.fill_in(exec, batch, on)?;
        let Captured::Ready(mut replay) = std::mem::take(&mut self.captured) else { return Ok(false) };
        self.lengths.fill(batch.q_lens, batch.kv_lens, self.sizes.seqs);
        if !replay.is_proven {
            let updated = self.update(exec, &mut replay);
            if updated.is_err() {
                exec.synchronize()?;
            }
            if let Captured::Never = self.resolve(exec, updated.map(|()| Captured::NotYet))? {
                self.captured = Captured::Never;
                return Ok(false);
            }
        }
        let ran = self.run(exec, batch, &mut replay, on);
        replay.is_proven = true;
        self.captured = Captured::Ready(replay);
        ran.map(|()| true)
    }

    /// Converts a failure that leaves the device usable to a note, and continues without a graph: on all cards, if
    /// there are several.
    fn resolve(&self, exec: &ExecContext, outcome: Result<Captured, AscendError>) -> Result<Captured, AscendError> {
        let outcome = match outcome {
            Err(error) if is_harmless(&error) => {
                let rows = self.sizes.tokens;
                exec.diagnostics.add(format!("decode steps of up to {rows} rows run operation by operation: {error}"));
                None
            }
            other => Some(other?),
        };
        let agreed = exec.all_agree(outcome.is_some())?;
        Ok(outcome.filter(|_| agreed).unwrap_or(Captured::Never))
    }

    /// Launches the graph, updates it, and copies its results.
    fn run(&self, exec: &ExecContext, batch: &Batch<'_>, replay: &mut Replay, on: usize) -> Result<(), AscendError> {
        let stream = exec.streams.get(on);
        let (wanted, all) = (batch.shape.logit_rows, self.sizes.logits);
        if wanted < all {
            let rest = self.lowering.fixed.status_rows.offset(4 * wanted);
            stream.copy_within(rest, replay.padding, 4 * (all - wanted))?;
        }
        replay.graph.launch(stream)?;
        if replay.is_proven {
            let updated = self.update(exec, replay);
            if updated.is_err() {
                // The replay waits for all updates, so let it end with stale lengths; its results are not read.
                let update = update_stream(exec)?;
                replay.layers.iter().try_for_each(|layer| update.record(&layer.event))?;
            }
            updated?;
        }
        let OutputBuffers { logits, argmax: best, status } = batch.results;
        stream.copy_within(logits, replay.results.logits, 4 * wanted * self.lowering.plan.vocab_size)?;
        stream.copy_within(best, replay.results.argmax, 4 * wanted)?;
        stream.copy_within(status, replay.results.status, batch.shape.tokens)?;
        stream.record(&replay.done)
    }

    /// Issues every layer's attention again with this batch's lengths.
    fn update(&self, exec: &ExecContext, replay: &mut Replay) -> Result<(), AscendError> {
        let update = update_stream(exec)?;
        update.wait(&replay.done)?;
        let Replay { layers, pool, shared, .. } = replay;
        for Refreshed { group, event, shape, query, out } in layers {
            TaskUpdate::run(update, group, || {
                self.attend(exec, shape, *query, *out, *pool, &self.lengths, &mut |op| launch(op, shared, update))
            })?;
            update.record(event)?;
        }
        Ok(())
    }

    fn capture(
        &mut self,
        exec: &mut ExecContext,
        pool: (DeviceAddress, u64),
        on: usize,
    ) -> Result<Replay, AscendError> {
        if exec.update.is_none() {
            exec.update = Some(Stream::new(&exec.context)?);
        }
        let rows = RowCounts { tokens: self.sizes.tokens, logits: self.sizes.logits };
        let mut pieces = RegionBuilder::default();
        let offsets = [4 * rows.logits * self.lowering.plan.vocab_size, 4 * rows.logits, rows.tokens, 4 * rows.logits]
            .map(|bytes| pieces.add(bytes));
        let region = alloc_zeroed(&exec.context, pieces.bytes())?;
        let [logits, best, status, padding] = offsets.map(|offset| region.address().offset(offset));
        let numbers: Vec<u8> =
            (rows.tokens..rows.tokens + rows.logits).flat_map(|row| to_u32(row).to_le_bytes()).collect();
        region.write(offsets[3], &numbers)?;
        let results = OutputBuffers { logits, argmax: best, status };
        // Capture with the longest lengths, so that the workspace suffices for shorter ones.
        let longest = to_u32(self.lowering.plan.bucket.kv_tokens);
        let seqs = self.sizes.seqs;
        self.lengths.fill(&vec![1; seqs], &vec![longest; seqs], seqs);

        let (exec, program, shared) = (&*exec, &*self, exec.shared());
        let stream = exec.streams.get(on);
        let done = Event::new(&exec.context, EventKind::Ordering)?;
        let count = program.forms.len();
        let mut events =
            (0..count).map(|_| Event::new(&exec.context, EventKind::External)).collect::<Result<Vec<_>, _>>()?;
        let mut layers = Vec::with_capacity(count);
        let capture = Capture::begin(stream, CaptureMode::ThreadLocal)?;
        for recipe in program.slots() {
            launch(recipe.build(&exec.ops)?, &shared, stream)?;
        }
        program.body_items(exec, shared.scratch(), &mut |item| match item {
            LoweredOp::Op(recipe) => launch(recipe.build(&exec.ops)?, &shared, stream),
            LoweredOp::Collective(meeting) => exec.run_collective(&meeting, stream),
            LoweredOp::KvWrite { layer, key, value } => {
                program.store(exec, layer, [key, value], rows.tokens, pool, &mut |op| launch(op, &shared, stream))
            }
            LoweredOp::Attention { shape, query, out } => {
                let event = match events.pop() {
                    Some(event) => event,
                    None => Event::new(&exec.context, EventKind::External)?,
                };
                stream.wait(&event)?;
                stream.reset(&event)?;
                let group = capture.group(|| {
                    let mut issue = |op| launch(op, &shared, stream);
                    program.attend(exec, &shape, query, out, pool, &program.lengths, &mut issue)
                })?;
                layers.push(Refreshed { group, event, shape, query, out });
                Ok(())
            }
        })?;
        program.tail(exec, rows, results, &shared, stream, &mut |op| launch(op, &shared, stream))?;
        let graph = capture.end()?;
        Ok(Replay { graph, layers, is_proven: false, done, pool, results, padding, shared, _region: region })
    }
}

fn launch(mut op: Op, shared: &Shared, on: &Stream) -> Result<(), AscendError> {
    let bytes = op.workspace_bytes();
    op.launch(shared.workspace.address(), bytes, on)
}

/// Stream that updates graphs; created before the first capture.
fn update_stream(exec: &ExecContext) -> Result<&Stream, AscendError> {
    exec.update.as_ref().ok_or_else(|| AscendError {
        call: "aclmdlRICaptureTaskUpdateBegin",
        code: ascend_sys::SHIM_MISUSE,
        kind: AscendErrorKind::Usage,
        message: "no update stream".into(),
    })
}
