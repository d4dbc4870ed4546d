//! The model on a device, behind [`Forward`]: stages a batch's buffers, launches the program, reads the logits back.

use std::sync::Arc;

use super::{Forward, ForwardInput, LogitRows};
use crate::device::{
    Bindings, Device, DeviceError, KvLayout, LaunchShape, MemKind, OwnedBuffer, OwnedProgram, ProgramId, Span,
    StepArgs, StreamId,
};
use crate::graph::{Bucket, Cost, CostRates};
use crate::kv_cache::BlockId;

/// Sizes that fix a runner's buffers.
#[derive(Clone, Copy, Debug)]
pub struct RunnerShape {
    /// Upper bounds of one batch.
    pub bucket: Bucket,
    /// Most sequences a batch has.
    pub max_seqs: usize,
    /// Most blocks a sequence has.
    pub max_blocks_per_seq: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Blocks in the pool.
    pub pool_blocks: usize,
    /// Width of a row of logits.
    pub vocab_size: usize,
}

/// Runs batches of one model on one device.
#[derive(Debug)]
pub struct ModelRunner {
    device: Arc<dyn Device>,
    program: OwnedProgram,
    stream: StreamId,
    layout: KvLayout,
    shape: RunnerShape,
    rates: CostRates,
    pool: OwnedBuffer,
    token_ids: OwnedBuffer,
    positions: OwnedBuffer,
    block_tables: OwnedBuffer,
    logit_rows: OwnedBuffer,
    logits: OwnedBuffer,
    row_status: OwnedBuffer,
    // Host staging, reused from batch to batch.
    host_positions: Vec<u32>,
    host_tables: Vec<u32>,
    host_logits: Vec<f32>,
    host_status: Vec<u8>,
}

impl ModelRunner {
    /// Reserves every buffer a batch may need. `rates` are those of the program's plan; the default ones cost nothing.
    pub fn new(
        device: Arc<dyn Device>,
        program: OwnedProgram,
        layout: KvLayout,
        shape: RunnerShape,
        rates: CostRates,
    ) -> Result<Self, DeviceError> {
        let buffer =
            |elements: usize, bytes: usize, kind| OwnedBuffer::new(&device, elements as u64 * bytes as u64, kind);
        let Bucket { tokens, logit_rows, .. } = shape.bucket;
        let table_entries = shape.max_seqs * shape.max_blocks_per_seq;
        Ok(Self {
            pool: buffer(
                shape.pool_blocks,
                usize::try_from(layout.bytes_per_block).unwrap_or(usize::MAX),
                MemKind::Device,
            )?,
            token_ids: buffer(tokens, 4, MemKind::Device)?,
            positions: buffer(tokens, 4, MemKind::Device)?,
            block_tables: buffer(table_entries, 4, MemKind::Device)?,
            logit_rows: buffer(logit_rows, 4, MemKind::Device)?,
            logits: buffer(logit_rows * shape.vocab_size, 4, MemKind::Device)?,
            row_status: buffer(logit_rows, 1, MemKind::Device)?,
            host_positions: Vec::with_capacity(tokens),
            host_tables: Vec::with_capacity(table_entries),
            host_logits: vec![0.0; logit_rows * shape.vocab_size],
            host_status: vec![0; logit_rows],
            stream: device.stream()?,
            device,
            program,
            layout,
            shape,
            rates,
        })
    }

    /// The sizes it was made for.
    pub const fn shape(&self) -> &RunnerShape {
        &self.shape
    }

    /// The plan it runs, as its device names it.
    pub const fn program(&self) -> ProgramId {
        self.program.id()
    }

    /// One launch; logits and status of `rows` rows land in the host buffers.
    fn launch(&mut self, input: &ForwardInput, rows: usize) -> Result<(), DeviceError> {
        let seqs = input.q_lens.len();
        self.host_positions.clear();
        for (q, kv) in input.q_lens.iter().zip(&input.kv_lens) {
            self.host_positions.extend(kv - q..*kv);
        }
        let table_stride = input.kv_lens.iter().map(|kv| self.blocks_of(*kv)).max().unwrap_or(0);
        self.host_tables.clear();
        let mut tables = input.tables.as_slice();
        for kv in &input.kv_lens {
            let (table, rest) = tables.split_at(self.blocks_of(*kv));
            tables = rest;
            self.host_tables.extend(table.iter().map(|block| block.0));
            self.host_tables.resize(self.host_tables.len().next_multiple_of(table_stride), 0);
        }
        let write = |buffer: &OwnedBuffer, data: &[u32]| {
            let bytes: &[u8] = bytemuck::cast_slice(data);
            self.device.write(buffer.first(bytes.len() as u64), bytes, self.stream)
        };
        write(&self.token_ids, &input.tokens)?;
        write(&self.positions, &self.host_positions)?;
        write(&self.block_tables, &self.host_tables)?;
        write(&self.logit_rows, &input.logit_rows)?;

        let shape = LaunchShape { tokens: input.tokens.len(), seqs, logit_rows: rows, table_stride };
        let io = self.bindings(&shape);
        let args = StepArgs { io, shape, q_lens: &input.q_lens, kv_lens: &input.kv_lens };
        self.device.launch(self.program.id(), &args, self.stream)?;

        if rows > 0 {
            let logits = &mut self.host_logits[..rows * self.shape.vocab_size];
            self.device.read(io.logits, bytemuck::cast_slice_mut(logits))?;
            self.device.read(io.row_status, &mut self.host_status[..rows])?;
        }
        Ok(())
    }

    /// Lists that belong together agree, so that staging them cannot go wrong; ids and blocks are the device's to check.
    fn check(&self, input: &ForwardInput) -> Result<(), DeviceError> {
        let lens = || input.q_lens.iter().zip(&input.kv_lens);
        let longest = self.shape.max_blocks_per_seq;
        let rules = [
            ("every sequence has both its lengths", input.q_lens.len() == input.kv_lens.len()),
            ("a sequence brings 1 to kv_len rows", lens().all(|(q, kv)| (1..=*kv).contains(q))),
            ("a sequence fits its line of blocks", lens().all(|(_, kv)| self.blocks_of(*kv) <= longest)),
            ("q_lens add up to the tokens", lens().map(|(q, _)| *q as usize).sum::<usize>() == input.tokens.len()),
            (
                "tables hold ceil(kv_len / block_size) blocks a sequence",
                lens().map(|(_, kv)| self.blocks_of(*kv)).sum::<usize>() == input.tables.len(),
            ),
        ];
        match rules.iter().find(|(_, holds)| !holds) {
            Some((rule, _)) => Err(DeviceError::Invalid { what: format!("batch: broken rule: {rule}") }),
            None => Ok(()),
        }
    }

    fn blocks_of(&self, kv_len: u32) -> usize {
        (kv_len as usize).div_ceil(self.shape.block_size)
    }

    fn bindings(&self, shape: &LaunchShape) -> Bindings {
        let words = |buffer: &OwnedBuffer, n: usize| buffer.first(4 * n as u64);
        Bindings {
            token_ids: words(&self.token_ids, shape.tokens),
            positions: words(&self.positions, shape.tokens),
            block_tables: words(&self.block_tables, shape.seqs * shape.table_stride),
            logit_rows: words(&self.logit_rows, shape.logit_rows),
            logits: words(&self.logits, shape.logit_rows * self.shape.vocab_size),
            row_status: self.row_status.first(shape.logit_rows as u64),
            kv_pool: self.pool_span(),
        }
    }

    fn pool_span(&self) -> Span {
        self.pool.span()
    }
}

impl Forward for ModelRunner {
    fn forward(&mut self, input: &ForwardInput) -> Result<LogitRows<'_>, DeviceError> {
        let rows = input.logit_rows.len();
        let vocab = self.shape.vocab_size;
        if input.tokens.is_empty() {
            return Ok(LogitRows { logits: &[], vocab, status: &[] });
        }
        let Bucket { tokens, logit_rows, .. } = self.shape.bucket;
        if input.tokens.len() > tokens || rows > logit_rows || input.q_lens.len() > self.shape.max_seqs {
            let got =
                format!("{} rows, {rows} of them with logits, {} sequences", input.tokens.len(), input.q_lens.len());
            let most = format!("{tokens} rows, {logit_rows} with logits, {} sequences", self.shape.max_seqs);
            return Err(DeviceError::Invalid { what: format!("batch of {got}; the runner was made for {most}") });
        }
        self.check(input)?;
        self.launch(input, rows)?;
        Ok(LogitRows { logits: &self.host_logits[..rows * vocab], vocab, status: &self.host_status[..rows] })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.device.copy_blocks(&self.layout, self.pool_span(), self.pool_span(), pairs, self.stream)
    }

    fn vocab_size(&self) -> usize {
        self.shape.vocab_size
    }

    fn cost(&self, input: &ForwardInput) -> Cost {
        self.rates.cost(&input.q_lens, &input.kv_lens, input.logit_rows.len() as u64)
    }
}
