//! The model on a device, behind [`Forward`]: stages a batch's buffers, launches the program, reads the logits back.

use std::sync::Arc;

use super::forward::{Forward, ForwardInput, Forwarded, LogitRows, NEVER, Outcome, SequenceOutcome};
use super::retry::{Part, Share};
use crate::device::{
    Bindings, CustomFailure, Device, DeviceError, KvLayout, LaunchShape, MemKind, OwnedBuffer, OwnedProgram, ProgramId,
    Span, StepArgs, StreamId,
};
use crate::graph::{Bucket, Cost, CostRates, RowStatus};
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

/// The programs of one model.
#[derive(Debug)]
pub struct Programs {
    /// One a bucket, ascending in its rows; the last has [`RunnerShape::bucket`].
    pub by_bucket: Vec<(Bucket, OwnedProgram)>,
    /// The same model with f32 activations, for sequences that overflowed; none if that is no other program, or not wanted.
    pub f32: Option<OwnedProgram>,
    /// What a batch costs, one for each rank.
    pub rates: Vec<CostRates>,
}

/// Runs batches of one model on one device.
#[derive(Debug)]
pub struct ModelRunner {
    device: Arc<dyn Device>,
    programs: Programs,
    stream: StreamId,
    layout: KvLayout,
    shape: RunnerShape,
    padded_rows: u64,
    pool: OwnedBuffer,
    token_ids: OwnedBuffer,
    positions: OwnedBuffer,
    block_tables: OwnedBuffer,
    logit_rows: OwnedBuffer,
    logits: OwnedBuffer,
    best: OwnedBuffer,
    row_status: OwnedBuffer,
    // Host staging, reused from batch to batch.
    positions_staged: Vec<u32>,
    tables_staged: Vec<u32>,
    /// What the batch gave, in its own order, whichever programs ran its parts.
    host: HostRows,
    outcomes: Vec<SequenceOutcome>,
    /// Custom operations that failed in the batch, by its own rows.
    custom_failures: Vec<CustomFailure>,
    part: Part,
}

/// Results of a batch on the host.
#[derive(Debug)]
struct HostRows {
    logits: Vec<f32>,
    best: Vec<u32>,
    /// Status of each row of logits.
    logit_status: Vec<u8>,
    /// Status of each row of the batch.
    row_status: Vec<u8>,
}

impl ModelRunner {
    /// Reserves every buffer a batch may need.
    pub fn new(
        device: Arc<dyn Device>,
        programs: Programs,
        layout: KvLayout,
        shape: RunnerShape,
    ) -> Result<Self, DeviceError> {
        let buffer =
            |elements: usize, bytes: usize, kind| OwnedBuffer::new(&device, elements as u64 * bytes as u64, kind);
        let Bucket { tokens, logit_rows, .. } = shape.bucket;
        let table_entries = shape.max_seqs * shape.max_blocks_per_seq;
        if !programs.by_bucket.last().is_some_and(|(bucket, _)| *bucket == shape.bucket) {
            return Err(DeviceError::Invalid { what: "no program for the runner's largest batch".into() });
        }
        Ok(Self {
            pool: buffer(
                shape.pool_blocks + usize::try_from(layout.reserved_blocks).unwrap_or(usize::MAX / 2),
                usize::try_from(layout.bytes_per_block).unwrap_or(usize::MAX),
                MemKind::Device,
            )?,
            token_ids: buffer(tokens, 4, MemKind::Device)?,
            positions: buffer(tokens, 4, MemKind::Device)?,
            block_tables: buffer(table_entries, 4, MemKind::Device)?,
            logit_rows: buffer(logit_rows, 4, MemKind::Device)?,
            logits: buffer(logit_rows * shape.vocab_size, 4, MemKind::Device)?,
            best: buffer(logit_rows, 4, MemKind::Device)?,
            row_status: buffer(tokens, 1, MemKind::Device)?,
            positions_staged: Vec::with_capacity(tokens),
            tables_staged: Vec::with_capacity(table_entries),
            host: HostRows {
                logits: vec![0.0; logit_rows * shape.vocab_size],
                best: vec![0; logit_rows],
                logit_status: vec![0; logit_rows],
                row_status: vec![0; tokens],
            },
            outcomes: Vec::with_capacity(shape.max_seqs),
            custom_failures: Vec::new(),
            part: Part::default(),
            stream: device.stream()?,
            padded_rows: 0,
            device,
            programs,
            layout,
            shape,
        })
    }

    /// The sizes it was made for.
    pub const fn shape(&self) -> &RunnerShape {
        &self.shape
    }

    /// The program of its largest batches, as its device names it.
    pub fn program(&self) -> ProgramId {
        self.program_of(Share::Main, self.shape.bucket.tokens).0
    }

    /// The program that runs this many rows, and the rows it runs them as.
    fn program_of(&self, share: Share, rows: usize) -> (ProgramId, usize) {
        let largest = self.shape.bucket.tokens;
        if let (Share::F32, Some(program)) = (share, &self.programs.f32) {
            return (program.id(), largest);
        }
        let fits = |(bucket, _): &&(Bucket, OwnedProgram)| bucket.tokens >= rows;
        let found = self.programs.by_bucket.iter().find(fits).or(self.programs.by_bucket.last());
        found.map_or((ProgramId(0), largest), |(bucket, program)| (program.id(), bucket.tokens))
    }

    /// One launch; what it gives stays on the device, as the bindings say.
    fn launch(&mut self, share: Share, input: &ForwardInput) -> Result<(Bindings, ProgramId), DeviceError> {
        let seqs = input.q_lens.len();
        self.positions_staged.clear();
        for (q, kv) in input.q_lens.iter().zip(&input.kv_lens) {
            self.positions_staged.extend(kv - q..*kv);
        }
        let table_stride = input.kv_lens.iter().map(|kv| self.blocks_of(*kv)).max().unwrap_or(0);
        self.tables_staged.clear();
        let mut tables = input.tables.as_slice();
        for kv in &input.kv_lens {
            let (table, rest) = tables.split_at(self.blocks_of(*kv));
            tables = rest;
            self.tables_staged.extend(table.iter().map(|block| block.0));
            self.tables_staged.resize(self.tables_staged.len().next_multiple_of(table_stride), 0);
        }
        let write = |buffer: &OwnedBuffer, data: &[u32]| {
            let bytes: &[u8] = bytemuck::cast_slice(data);
            self.device.write(buffer.first(bytes.len() as u64), bytes, self.stream)
        };
        write(&self.token_ids, &input.tokens)?;
        write(&self.positions, &self.positions_staged)?;
        write(&self.block_tables, &self.tables_staged)?;
        write(&self.logit_rows, &input.logit_rows)?;

        let tokens = input.tokens.len();
        let shape = LaunchShape { tokens, seqs, logit_rows: input.logit_rows.len(), table_stride };
        let io = self.bindings(&shape);
        let args = StepArgs { io, shape, q_lens: &input.q_lens, kv_lens: &input.kv_lens };
        let (program, bucket_rows) = self.program_of(share, tokens);
        if self.device.caps().static_shapes {
            self.padded_rows += (bucket_rows - tokens) as u64;
        }
        self.device.launch(program, &args, self.stream)?;
        Ok((io, program))
    }

    /// Runs the batch as it stands.
    fn run_whole(&mut self, share: Share, input: &ForwardInput) -> Result<(), DeviceError> {
        let (tokens, rows) = (input.tokens.len(), input.logit_rows.len());
        let (io, program) = self.launch(share, input)?;
        self.device.read(io.row_status, &mut self.host.row_status[..tokens], None)?;
        if self.host.row_status[..tokens].contains(&(RowStatus::CustomOpFailed as u8)) {
            self.custom_failures.extend(self.device.custom_failures(program));
        }
        if rows > 0 {
            let logits = &mut self.host.logits[..rows * self.shape.vocab_size];
            self.device.read(io.logits, bytemuck::cast_slice_mut(logits), None)?;
            self.device.read(io.best, bytemuck::cast_slice_mut(&mut self.host.best[..rows]), None)?;
        }
        Ok(())
    }

    /// Runs the rows of the batch that the part names, and puts what they give in its place.
    fn run_part(&mut self, share: Share) -> Result<(), DeviceError> {
        let part = std::mem::take(&mut self.part);
        let outcome = self.run_part_of(share, &part);
        self.part = part;
        outcome
    }

    fn run_part_of(&mut self, share: Share, part: &Part) -> Result<(), DeviceError> {
        if part.input.tokens.is_empty() {
            return Ok(());
        }
        let (io, program) = self.launch(share, &part.input)?;
        let piece = |span: Span, index: usize, bytes: usize| Span {
            offset: span.offset + (index * bytes) as u64,
            bytes: bytes as u64,
            ..span
        };
        for (index, &row) in part.rows.iter().enumerate() {
            self.device.read(piece(io.row_status, index, 1), &mut self.host.row_status[row..=row], None)?;
        }
        if part.rows.iter().any(|&row| self.host.row_status[row] == RowStatus::CustomOpFailed as u8) {
            // A call has the rows of one sequence, which stand together in the whole as well.
            let place = |row: usize| part.rows.get(row).copied().unwrap_or(usize::MAX);
            let failures = self.device.custom_failures(program).into_iter();
            self.custom_failures.extend(failures.map(|failure| {
                let start = place(failure.rows.start);
                CustomFailure { rows: start..start.saturating_add(failure.rows.len()), ..failure }
            }));
        }
        let vocab = self.shape.vocab_size;
        for (index, &row) in part.logit_rows.iter().enumerate() {
            let logits = &mut self.host.logits[row * vocab..][..vocab];
            self.device.read(piece(io.logits, index, 4 * vocab), bytemuck::cast_slice_mut(logits), None)?;
            let best = &mut self.host.best[row..=row];
            self.device.read(piece(io.best, index, 4), bytemuck::cast_slice_mut(best), None)?;
        }
        Ok(())
    }

    /// Runs a batch: all of it in one program, unless some of it needs f32 activations.
    fn run(&mut self, input: &ForwardInput) -> Result<(), DeviceError> {
        self.outcomes.clear();
        self.custom_failures.clear();
        let f32_from = |index: usize| input.f32_from.get(index).copied().unwrap_or(NEVER);
        let some_f32 = self.programs.f32.is_some() && input.f32_from.iter().any(|from| *from != NEVER);
        if some_f32 {
            self.part.pick(input, self.shape.block_size, |index| (f32_from(index) == NEVER).then_some(0));
            self.run_part(Share::Main)?;
        } else {
            self.run_whole(Share::Main, input)?;
        }
        let bad = |status: &u8| *status != RowStatus::Ok as u8;
        if self.programs.f32.is_some() && (some_f32 || self.host.row_status[..input.tokens.len()].iter().any(bad)) {
            self.retry(input)?;
        }
        if self.host.row_status[..input.tokens.len()].iter().any(bad) {
            self.tell_failures(input);
        }
        for (status, row) in self.host.logit_status.iter_mut().zip(&input.logit_rows) {
            *status = self.host.row_status[*row as usize];
        }
        Ok(())
    }

    /// Runs with f32 activations what has to: sequences that overflowed earlier, and others from their first bad row on.
    fn retry(&mut self, input: &ForwardInput) -> Result<(), DeviceError> {
        let Self { part, outcomes, host, shape, .. } = self;
        let mut first_row = 0;
        part.pick(input, shape.block_size, |index| {
            let (rows, kv_len) = (input.q_lens[index], input.kv_lens[index]);
            let statuses = &host.row_status[first_row..first_row + rows as usize];
            first_row += rows as usize;
            if input.f32_from.get(index).is_some_and(|from| *from != NEVER) {
                return Some(0);
            }
            let bad = statuses.iter().position(|status| *status != RowStatus::Ok as u8)?;
            if RowStatus::from_byte(statuses[bad]) == RowStatus::CustomOpFailed {
                return None;
            }
            let offset = u32::try_from(bad).unwrap_or(u32::MAX);
            let position = kv_len - rows + offset;
            outcomes.push(SequenceOutcome { sequence: index, position, outcome: Outcome::Retried });
            Some(offset)
        });
        self.run_part(Share::F32)
    }

    /// Tells of each sequence's first row that is still bad.
    fn tell_failures(&mut self, input: &ForwardInput) {
        let mut first_row = 0;
        for (sequence, (rows, kv_len)) in input.q_lens.iter().zip(&input.kv_lens).enumerate() {
            let statuses = &self.host.row_status[first_row..first_row + *rows as usize];
            if let Some(bad) = statuses.iter().position(|status| *status != RowStatus::Ok as u8) {
                let status = RowStatus::from_byte(statuses[bad]);
                let row = first_row + bad;
                let custom = (status == RowStatus::CustomOpFailed).then(|| self.custom_failure(row)).flatten();
                let position = kv_len - rows + u32::try_from(bad).unwrap_or(u32::MAX);
                let outcome = Outcome::Failed { status, custom };
                self.outcomes.push(SequenceOutcome { sequence, position, outcome });
            }
            first_row += *rows as usize;
        }
    }

    /// What the device said of a custom operation that failed at this row of the batch.
    fn custom_failure(&self, row: usize) -> Option<CustomFailure> {
        self.custom_failures.iter().find(|failure| failure.rows.contains(&row)).cloned()
    }

    /// Lists that belong together agree, so that staging them cannot go wrong; ids and blocks are the device's to check.
    fn check(&self, input: &ForwardInput) -> Result<(), DeviceError> {
        let lens = || input.q_lens.iter().zip(&input.kv_lens);
        let longest = self.shape.max_blocks_per_seq;
        let starts = || lens().map(|(q, kv)| kv.saturating_sub(*q)).zip(&input.f32_from);
        let rules = [
            ("every sequence has both its lengths", input.q_lens.len() == input.kv_lens.len()),
            ("a sequence brings 1 to kv_len rows", lens().all(|(q, kv)| (1..=*kv).contains(q))),
            ("a sequence fits its line of blocks", lens().all(|(_, kv)| self.blocks_of(*kv) <= longest)),
            ("q_lens add up to the tokens", lens().map(|(q, _)| *q as usize).sum::<usize>() == input.tokens.len()),
            (
                "tables hold ceil(kv_len / block_size) blocks a sequence",
                lens().map(|(_, kv)| self.blocks_of(*kv)).sum::<usize>() == input.tables.len(),
            ),
            ("logit rows ascend", input.logit_rows.is_sorted_by(|a, b| a < b)),
            (
                "logit rows are rows of the batch",
                input.logit_rows.last().is_none_or(|&row| (row as usize) < input.tokens.len()),
            ),
            (
                "f32_from has nothing or a position a sequence, none behind its first row",
                input.f32_from.is_empty()
                    || (input.f32_from.len() == input.q_lens.len()
                        && starts().all(|(start, from)| *from == NEVER || *from <= start)),
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
            best: words(&self.best, shape.logit_rows),
            row_status: self.row_status.first(shape.tokens as u64),
            kv_pool: self.pool_span(),
        }
    }

    fn pool_span(&self) -> Span {
        self.pool.span()
    }
}

impl Forward for ModelRunner {
    fn forward(&mut self, input: &ForwardInput) -> Result<Forwarded<'_>, DeviceError> {
        let rows = input.logit_rows.len();
        let vocab = self.shape.vocab_size;
        if input.tokens.is_empty() {
            return Ok(LogitRows { vocab, ..LogitRows::EMPTY }.into());
        }
        let Bucket { tokens, logit_rows, .. } = self.shape.bucket;
        if input.tokens.len() > tokens || rows > logit_rows || input.q_lens.len() > self.shape.max_seqs {
            let got =
                format!("{} rows, {rows} of them with logits, {} sequences", input.tokens.len(), input.q_lens.len());
            let most = format!("{tokens} rows, {logit_rows} with logits, {} sequences", self.shape.max_seqs);
            return Err(DeviceError::Invalid { what: format!("batch of {got}; the runner was made for {most}") });
        }
        self.check(input)?;
        self.run(input)?;
        let logits = LogitRows {
            logits: &self.host.logits[..rows * vocab],
            vocab,
            status: &self.host.logit_status[..rows],
            best: &self.host.best[..rows],
        };
        Ok(Forwarded { logits, outcomes: &self.outcomes })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.device.copy_blocks(&self.layout, self.pool_span(), self.pool_span(), pairs, self.stream)
    }

    fn vocab_size(&self) -> usize {
        self.shape.vocab_size
    }

    fn overflows(&self) -> Vec<(&'static str, u64)> {
        let mut sums: Vec<(&'static str, u64)> = Vec::new();
        let programs = self.programs.by_bucket.iter().map(|(_, program)| program).chain(&self.programs.f32);
        for (op, count) in programs.flat_map(|program| self.device.overflows(program.id())) {
            match sums.iter_mut().find(|(known, _)| *known == op) {
                Some((_, sum)) => *sum += count,
                None => sums.push((op, count)),
            }
        }
        sums
    }

    fn padded_rows(&self) -> u64 {
        self.padded_rows
    }

    fn cost(&self, input: &ForwardInput) -> Cost {
        let of_rank = |rates: &CostRates| rates.cost(&input.q_lens, &input.kv_lens, input.logit_rows.len() as u64);
        self.programs.rates.iter().map(of_rank).sum()
    }
}
