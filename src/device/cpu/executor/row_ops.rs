//! Executes operations that work row by row; each worker takes whole rows.

use super::group::GroupContext;
use super::launch::{floats, floats_mut, overlap};
use super::row_status::RowStatusFlags;
use super::scratch::{Continuation, WorkerScratch};
use crate::device::DeviceError;
use crate::device::cpu::Isa;
use crate::device::cpu::kernels::activation::{
    add_row, gelu_tanh_mul_row, gelu_tanh_row, mul_row, scale_row, silu_mul_row, silu_row,
};
use crate::device::cpu::kernels::argmax::{argmax_row, is_finite};
use crate::device::cpu::kernels::cast::{F16_MAX, count_beyond, round_bf16_row, round_f16_row};
use crate::device::cpu::kernels::norm::{qk_norm_row, rms_norm_row};
use crate::device::cpu::kernels::q8_rows::QuantLayout;
use crate::device::cpu::kernels::quantize::quantize_row;
use crate::device::cpu::kernels::rope::{rope_angles, rope_row};
use crate::device::cpu::memory::Partition;
use crate::graph::{
    ActivationKind, ActivationType, NO_TOKEN, NormSpec, Op, RopeStyle, RowDim, RowStatus, Step, WeightId, row_bytes,
};

/// Runs `body(row, out row, worker's scratch)` for every row of a row-major matrix; rows are split among workers.
fn each_row<T: Send + Sync>(
    workers: usize,
    out: &mut [T],
    cols: usize,
    then: Continuation<'_>,
    body: impl Fn(usize, &mut [T], &mut [f32]) + Sync,
) -> Result<(), DeviceError> {
    let parts = Partition::rows(out, cols, workers, 1);
    then(&|worker, scratch: &mut WorkerScratch| {
        let mut tile = parts.claim(worker.index());
        for index in 0..tile.rows() {
            let row = tile.first() + index;
            body(row, tile.row_mut(index), &mut scratch.row);
        }
    })
}

/// Rounding of the rows of a step.
#[derive(Clone, Copy)]
struct RowCast<'a> {
    isa: Isa,
    to: ActivationType,
    op: &'a Op,
    flags: &'a RowStatusFlags,
    /// Batch rows that correspond to the step's rows, if they differ.
    logit_rows: Option<&'a [u32]>,
}

impl RowCast<'_> {
    /// Rounds one row. Half precision saturates; saturated elements are counted and mark the row, unless the policy is
    /// to clamp.
    fn row(&self, row: usize, x: &[f32], out: &mut [u8]) {
        match self.to {
            ActivationType::Int8 => quantize_row(self.isa, QuantLayout::new(x.len()), x, out),
            ActivationType::F32 => floats_mut(out).copy_from_slice(x),
            ActivationType::BF16 => round_bf16_row(self.isa, x, bytemuck::cast_slice_mut(out)),
            ActivationType::F16 => {
                round_f16_row(self.isa, x, floats_mut(out));
                let row = self.logit_rows.map_or(row, |rows| rows[row] as usize);
                self.flags.overflow(self.op, row, count_beyond(self.isa, x, F16_MAX));
            }
        }
    }
}

fn norm_row(isa: Isa, x: &[f32], norm: &NormSpec, weight: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks_exact(norm.group).zip(out.chunks_exact_mut(norm.group)) {
        rms_norm_row(isa, x, weight, norm.eps, out);
    }
}

impl GroupContext<'_> {
    pub(super) fn embed(
        &self,
        table: WeightId,
        first_id: u32,
        step: &Step,
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let (out, cols) = (step.outputs[0], self.cols(step.outputs[0]));
        let (table, ids) = (self.weights.matrix(table), self.launch.token_ids);
        each_row(self.workers(), floats_mut(self.write(out)?), cols, then, |row, out, _| {
            match ids[row].checked_sub(first_id).map(|id| id as usize).filter(|&id| id < table.n()) {
                Some(id) => table.row_f32(id, out),
                None => out.fill(0.0),
            }
        })
    }

    pub(super) fn rope_angles(&self, rope: usize, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let (out, cols) = (step.outputs[0], self.cols(step.outputs[0]));
        let (rope, positions) = (&self.plan.ropes[rope], self.launch.positions);
        each_row(self.workers(), floats_mut(self.write(out)?), cols, then, |row, out, _| {
            let (cos, sin) = out.split_at_mut(cols / 2);
            rope_angles(&rope.inv_freq, positions[row], rope.attention_factor, cos, sin);
        })
    }

    /// Computes out = f(x), row by row.
    fn map_rows(
        &self,
        step: &Step,
        then: Continuation<'_>,
        body: impl Fn(&[f32], &mut [f32]) + Sync,
    ) -> Result<(), DeviceError> {
        let (x, out, cols) = (step.inputs[0], step.outputs[0], self.cols(step.outputs[0]));
        let (x, out) = (floats(self.read(x)?), floats_mut(self.write(out)?));
        each_row(self.workers(), out, cols, then, |row, out, _| body(&x[row * cols..][..cols], out))
    }

    pub(super) fn rms_norm(&self, norm: &NormSpec, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let (isa, weight) = (self.isa(), self.weights.vector(norm.weight));
        self.map_rows(step, then, |x, out| norm_row(isa, x, norm, weight, out))
    }

    pub(super) fn activation(
        &self,
        kind: ActivationKind,
        step: &Step,
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let isa = self.isa();
        self.map_rows(step, then, |x, out| {
            out.copy_from_slice(x);
            match kind {
                ActivationKind::Silu => silu_row(isa, out),
                ActivationKind::GeluTanh => gelu_tanh_row(isa, out),
            }
        })
    }

    pub(super) fn scale(&self, factor: f32, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let isa = self.isa();
        self.map_rows(step, then, |x, out| {
            out.copy_from_slice(x);
            scale_row(isa, out, factor);
        })
    }

    /// Computes out = f(a, b), row by row.
    fn zip_rows(
        &self,
        step: &Step,
        then: Continuation<'_>,
        body: impl Fn(&[f32], &[f32], &mut [f32]) + Sync,
    ) -> Result<(), DeviceError> {
        let cols = self.cols(step.outputs[0]);
        let (a, b) = (floats(self.read(step.inputs[0])?), floats(self.read(step.inputs[1])?));
        let out = floats_mut(self.write(step.outputs[0])?);
        each_row(self.workers(), out, cols, then, |row, out, _| {
            body(&a[row * cols..][..cols], &b[row * cols..][..cols], out);
        })
    }

    pub(super) fn add(&self, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let isa = self.isa();
        self.zip_rows(step, then, |a, b, out| {
            out.copy_from_slice(a);
            add_row(isa, out, b);
        })
    }

    pub(super) fn mul(&self, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let isa = self.isa();
        self.zip_rows(step, then, |a, b, out| mul_row(isa, a, b, out))
    }

    /// Computes `out = f(row)`, rounded, row by row of `cols` elements. `f` writes to a scratch row.
    fn cast_rows(
        &self,
        to: ActivationType,
        step: &Step,
        (out, cols): (&mut [u8], usize),
        then: Continuation<'_>,
        body: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<(), DeviceError> {
        let (cast, row_bytes) = (self.row_cast(to, step), row_bytes(to.elem(), cols));
        each_row(self.workers(), out, row_bytes, then, |row, out, scratch| {
            if to == ActivationType::F32 {
                body(row, floats_mut(out));
            } else {
                body(row, &mut scratch[..cols]);
                cast.row(row, &scratch[..cols], out);
            }
        })
    }

    fn row_cast<'s>(&'s self, to: ActivationType, step: &'s Step) -> RowCast<'s> {
        let of_logits = self.plan.values[step.inputs[0]].rows == RowDim::LogitRows;
        let logit_rows = of_logits.then_some(self.launch.logit_rows);
        RowCast { isa: self.isa(), to, op: &step.op, flags: self.flags(), logit_rows }
    }

    pub(super) fn cast(&self, to: ActivationType, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let cols = self.cols(step.inputs[0]);
        let x = floats(self.read(step.inputs[0])?);
        self.cast_rows(to, step, (self.write(step.outputs[0])?, cols), then, |row, out| {
            out.copy_from_slice(&x[row * cols..][..cols]);
        })
    }

    pub(super) fn norm_cast(
        &self,
        norm: &NormSpec,
        to: ActivationType,
        step: &Step,
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let (isa, cols, weight) = (self.isa(), self.cols(step.inputs[0]), self.weights.vector(norm.weight));
        let x = floats(self.read(step.inputs[0])?);
        self.cast_rows(to, step, (self.write(step.outputs[0])?, cols), then, |row, out| {
            norm_row(isa, &x[row * cols..][..cols], norm, weight, out);
        })
    }

    pub(super) fn add_rms_norm(
        &self,
        norm: &NormSpec,
        to: ActivationType,
        step: &Step,
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let (isa, cols, weight) = (self.isa(), self.cols(step.outputs[0]), self.weights.vector(norm.weight));
        let (x, d) = (floats(self.read(step.inputs[0])?), floats(self.read(step.inputs[1])?));
        let sums = Partition::rows(floats_mut(self.write(step.outputs[0])?), cols, self.workers(), 1);
        let row_bytes = self.plan.values[step.outputs[1]].row_bytes();
        let outs = Partition::rows(self.write(step.outputs[1])?, row_bytes, self.workers(), 1);
        let cast = self.row_cast(to, step);
        then(&|worker, scratch| {
            let (mut sums, mut outs) = (sums.claim(worker.index()), outs.claim(worker.index()));
            for index in 0..sums.rows() {
                let row = sums.first() + index;
                let sum = sums.row_mut(index);
                sum.copy_from_slice(&x[row * cols..][..cols]);
                add_row(isa, sum, &d[row * cols..][..cols]);
                let out = outs.row_mut(index);
                if to == ActivationType::F32 {
                    norm_row(isa, sum, norm, weight, floats_mut(out));
                } else {
                    norm_row(isa, sum, norm, weight, &mut scratch.row[..cols]);
                    cast.row(row, &scratch.row[..cols], out);
                }
            }
        })
    }

    pub(super) fn rope(
        &self,
        (head_dim, style): (usize, RopeStyle),
        norm: Option<&NormSpec>,
        step: &Step,
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let isa = self.isa();
        let (cols, angle_cols) = (self.cols(step.outputs[0]), self.cols(step.inputs[1]));
        let weight = norm.map(|norm| (self.weights.vector(norm.weight), norm.eps));
        let (x, angles) = (floats(self.read(step.inputs[0])?), floats(self.read(step.inputs[1])?));
        let out = floats_mut(self.write(step.outputs[0])?);
        each_row(self.workers(), out, cols, then, |row, out, _| {
            out.copy_from_slice(&x[row * cols..][..cols]);
            rotate(isa, out, head_dim, style, weight, &angles[row * angle_cols..][..angle_cols]);
        })
    }

    pub(super) fn act_mul(&self, kind: ActivationKind, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        self.act_mul_into((kind, ActivationType::F32), step, self.write(step.outputs[0])?, then)
    }

    /// Computes out = act(gate) · up, rounded.
    pub(super) fn act_mul_into(
        &self,
        (kind, to): (ActivationKind, ActivationType),
        step: &Step,
        out: &mut [u8],
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let (isa, cols) = (self.isa(), self.cols(step.inputs[0]));
        let product = move |gate: &[f32], up: &[f32], out: &mut [f32]| match kind {
            ActivationKind::Silu => silu_mul_row(isa, gate, up, out),
            ActivationKind::GeluTanh => gelu_tanh_mul_row(isa, gate, up, out),
        };
        let (gate, up) = (floats(self.read(step.inputs[0])?), floats(self.read(step.inputs[1])?));
        self.cast_rows(to, step, (out, cols), then, |row, out| {
            product(&gate[row * cols..][..cols], &up[row * cols..][..cols], out);
        })
    }

    pub(super) fn gather_rows(&self, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let (cols, wanted) = (self.cols(step.outputs[0]), self.launch.logit_rows);
        let (x, out) = (floats(self.read(step.inputs[0])?), floats_mut(self.write(step.outputs[0])?));
        each_row(self.workers(), out, cols, then, |row, out, _| {
            out.copy_from_slice(&x[wanted[row] as usize * cols..][..cols]);
        })
    }

    pub(super) fn argmax(&self, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let (isa, cols) = (self.isa(), self.cols(step.inputs[0]));
        let logits = floats(self.read(step.inputs[0])?);
        let (flags, wanted) = (self.flags(), self.launch.logit_rows);
        let best: &mut [u32] = bytemuck::cast_slice_mut(self.write(step.outputs[0])?);
        each_row(self.workers(), best, 1, then, |row, best, _| {
            best[0] = argmax_row(isa, &logits[row * cols..][..cols], 0).id;
            if best[0] == NO_TOKEN {
                flags.mark(wanted[row] as usize, RowStatus::NonFinite);
            }
        })
    }

    pub(super) fn row_status(&self, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        let (isa, cols) = (self.isa(), self.cols(step.inputs[0]));
        let last = floats(self.read(step.inputs[0])?);
        let flags = self.flags();
        let status = self.row_status.write(0..self.launch.shape.tokens).ok_or_else(overlap)?;
        each_row(self.workers(), status, 1, then, |row, status, _| {
            if !is_finite(isa, &last[row * cols..][..cols]) {
                flags.mark(row, RowStatus::NonFinite);
            }
            status[0] = flags.status_of(row);
        })
    }
}

/// Applies the head norm (if any) and the rotation to one row in place. `angles` holds cosines, then sines.
pub(super) fn rotate(
    isa: Isa,
    row: &mut [f32],
    head_dim: usize,
    style: RopeStyle,
    norm: Option<(&[f32], f32)>,
    angles: &[f32],
) {
    if let Some((weight, eps)) = norm {
        qk_norm_row(isa, row, weight, eps);
    }
    let (cos, sin) = angles.split_at(angles.len() / 2);
    rope_row(isa, row, head_dim, style, cos, sin);
}
