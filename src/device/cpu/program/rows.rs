//! Operations that work row by row: members take whole rows.

use super::operands::{floats, floats_mut, overlap};
use super::{Frame, MemberScratch};
use crate::device::DeviceError;
use crate::device::cpu::Isa;
use crate::device::cpu::activation::{add_row, gelu_tanh_mul_row, gelu_tanh_row, mul_row, silu_mul_row, silu_row};
use crate::device::cpu::arena::Parts;
use crate::device::cpu::norm::{qk_norm_row, rms_norm_row};
use crate::device::cpu::pool::{Member, Team};
use crate::device::cpu::quant::{QuantLayout, quantise_row};
use crate::device::cpu::rope::{rope_angles, rope_row};
use crate::graph::{ActivationKind, Elem, NormSpec, RopeStyle, RowStatus, Step, WeightId};

/// Runs `body(row, out row)` for every row of a row-major matrix, rows split among members.
fn each_row<T: Send + Sync>(team: &Team, out: &mut [T], cols: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    let parts = Parts::rows(out, cols, team.count(), 1);
    team.run(&|member| {
        let mut tile = parts.claim(member.index());
        for index in 0..tile.rows() {
            let row = tile.first() + index;
            body(row, tile.row_mut(index));
        }
    });
}

/// As [`each_row`], with the member's own room.
fn each_row_with_room(
    team: &Team,
    room: &mut [MemberScratch],
    out: &mut [u8],
    row_bytes: usize,
    body: impl Fn(usize, &mut [u8], &mut [f32]) + Sync,
) {
    let parts = Parts::rows(out, row_bytes, team.count(), 1);
    let rooms = Parts::rows(room, 1, team.count(), 1);
    team.run(&|member: &Member<'_>| {
        let (mut tile, mut room) = (parts.claim(member.index()), rooms.claim(member.index()));
        let room = &mut room.row_mut(0)[0].row;
        for index in 0..tile.rows() {
            let row = tile.first() + index;
            body(row, tile.row_mut(index), room);
        }
    });
}

fn norm_row(isa: Isa, x: &[f32], norm: &NormSpec, weight: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks_exact(norm.group).zip(out.chunks_exact_mut(norm.group)) {
        rms_norm_row(isa, x, weight, norm.eps, out);
    }
}

impl Frame<'_> {
    pub(super) fn embed(&mut self, table: WeightId, step: &Step) -> Result<(), DeviceError> {
        let (out, cols) = (self.range(step.outputs[0])?, self.cols(step.outputs[0]));
        let (table, ids) = (self.weights.matrix(table), self.io.token_ids);
        let ([], [out]) = self.arena.views([], [out]).ok_or_else(overlap)?;
        each_row(self.team, floats_mut(out), cols, |row, out| table.row_f32(ids[row] as usize, out));
        Ok(())
    }

    pub(super) fn rope_angles(&mut self, rope: usize, step: &Step) -> Result<(), DeviceError> {
        let (out, cols) = (self.range(step.outputs[0])?, self.cols(step.outputs[0]));
        let (rope, positions) = (&self.plan.ropes[rope], self.io.positions);
        let ([], [out]) = self.arena.views([], [out]).ok_or_else(overlap)?;
        each_row(self.team, floats_mut(out), cols, |row, out| {
            let (cos, sin) = out.split_at_mut(cols / 2);
            rope_angles(&rope.inv_freq, positions[row], rope.attention_factor, cos, sin);
        });
        Ok(())
    }

    /// out = f(x), row by row.
    fn map_rows(&mut self, x: usize, out: usize, body: impl Fn(&[f32], &mut [f32]) + Sync) -> Result<(), DeviceError> {
        let cols = self.cols(out);
        let (x, out) = (self.range(x)?, self.range(out)?);
        let ([x], [out]) = self.arena.views([x], [out]).ok_or_else(overlap)?;
        let x = floats(x);
        each_row(self.team, floats_mut(out), cols, |row, out| body(&x[row * cols..][..cols], out));
        Ok(())
    }

    pub(super) fn rms_norm(&mut self, norm: &NormSpec, step: &Step) -> Result<(), DeviceError> {
        let (isa, weight) = (self.isa, self.weights.vector(norm.weight));
        self.map_rows(step.inputs[0], step.outputs[0], |x, out| norm_row(isa, x, norm, weight, out))
    }

    pub(super) fn activation(&mut self, kind: ActivationKind, step: &Step) -> Result<(), DeviceError> {
        let isa = self.isa;
        self.map_rows(step.inputs[0], step.outputs[0], |x, out| {
            out.copy_from_slice(x);
            match kind {
                ActivationKind::Silu => silu_row(isa, out),
                ActivationKind::GeluTanh => gelu_tanh_row(isa, out),
            }
        })
    }

    /// out = f(a, b), row by row.
    fn zip_rows(&mut self, step: &Step, body: impl Fn(&[f32], &[f32], &mut [f32]) + Sync) -> Result<(), DeviceError> {
        let cols = self.cols(step.outputs[0]);
        let (a, b, out) = (self.range(step.inputs[0])?, self.range(step.inputs[1])?, self.range(step.outputs[0])?);
        let ([a, b], [out]) = self.arena.views([a, b], [out]).ok_or_else(overlap)?;
        let (a, b) = (floats(a), floats(b));
        each_row(self.team, floats_mut(out), cols, |row, out| {
            body(&a[row * cols..][..cols], &b[row * cols..][..cols], out);
        });
        Ok(())
    }

    pub(super) fn add(&mut self, step: &Step) -> Result<(), DeviceError> {
        let isa = self.isa;
        self.zip_rows(step, |a, b, out| {
            out.copy_from_slice(a);
            add_row(isa, out, b);
        })
    }

    pub(super) fn mul(&mut self, step: &Step) -> Result<(), DeviceError> {
        let isa = self.isa;
        self.zip_rows(step, |a, b, out| mul_row(isa, a, b, out))
    }

    pub(super) fn quantise(&mut self, step: &Step) -> Result<(), DeviceError> {
        let layout = QuantLayout::new(self.cols(step.inputs[0]));
        let (isa, cols) = (self.isa, layout.k());
        let (x, out) = (self.range(step.inputs[0])?, self.range(step.outputs[0])?);
        let ([x], [out]) = self.arena.views([x], [out]).ok_or_else(overlap)?;
        let x = floats(x);
        each_row(self.team, out, layout.row_bytes(), |row, out| {
            quantise_row(isa, layout, &x[row * cols..][..cols], out);
        });
        Ok(())
    }

    pub(super) fn norm_quantise(&mut self, norm: &NormSpec, step: &Step) -> Result<(), DeviceError> {
        let layout = QuantLayout::new(self.cols(step.inputs[0]));
        let (isa, cols, weight) = (self.isa, layout.k(), self.weights.vector(norm.weight));
        let (x, out) = (self.range(step.inputs[0])?, self.range(step.outputs[0])?);
        let ([x], [out]) = self.arena.views([x], [out]).ok_or_else(overlap)?;
        let x = floats(x);
        let members = &mut self.scratch.members;
        each_row_with_room(self.team, members, out, layout.row_bytes(), |row, out, room| {
            let normed = &mut room[..cols];
            norm_row(isa, &x[row * cols..][..cols], norm, weight, normed);
            quantise_row(isa, layout, normed, out);
        });
        Ok(())
    }

    pub(super) fn add_rms_norm(&mut self, norm: &NormSpec, quantise: bool, step: &Step) -> Result<(), DeviceError> {
        let layout = QuantLayout::new(self.cols(step.outputs[0]));
        let (isa, cols, weight) = (self.isa, layout.k(), self.weights.vector(norm.weight));
        let (x, d) = (self.range(step.inputs[0])?, self.range(step.inputs[1])?);
        let (sum, out) = (self.range(step.outputs[0])?, self.range(step.outputs[1])?);
        let ([x, d], [sum, out]) = self.arena.views([x, d], [sum, out]).ok_or_else(overlap)?;
        let (x, d) = (floats(x), floats(d));
        let sums = Parts::rows(floats_mut(sum), cols, self.team.count(), 1);
        let add = |row: usize, sum: &mut [f32]| {
            sum.copy_from_slice(&x[row * cols..][..cols]);
            add_row(isa, sum, &d[row * cols..][..cols]);
        };
        if quantise {
            let outs = Parts::rows(out, layout.row_bytes(), self.team.count(), 1);
            let rooms = Parts::rows(&mut self.scratch.members, 1, self.team.count(), 1);
            self.team.run(&|member| {
                let mut sums = sums.claim(member.index());
                let (mut outs, mut room) = (outs.claim(member.index()), rooms.claim(member.index()));
                let normed = &mut room.row_mut(0)[0].row[..cols];
                for index in 0..sums.rows() {
                    add(sums.first() + index, sums.row_mut(index));
                    norm_row(isa, sums.row(index), norm, weight, normed);
                    quantise_row(isa, layout, normed, outs.row_mut(index));
                }
            });
        } else {
            let outs = Parts::rows(floats_mut(out), cols, self.team.count(), 1);
            self.team.run(&|member| {
                let (mut sums, mut outs) = (sums.claim(member.index()), outs.claim(member.index()));
                for index in 0..sums.rows() {
                    add(sums.first() + index, sums.row_mut(index));
                    norm_row(isa, sums.row(index), norm, weight, outs.row_mut(index));
                }
            });
        }
        Ok(())
    }

    pub(super) fn rope(
        &mut self,
        head_dim: usize,
        style: RopeStyle,
        norm: Option<&NormSpec>,
        step: &Step,
    ) -> Result<(), DeviceError> {
        let isa = self.isa;
        let (cols, angle_cols) = (self.cols(step.outputs[0]), self.cols(step.inputs[1]));
        let weight = norm.map(|norm| (self.weights.vector(norm.weight), norm.eps));
        let (x, angles) = (self.range(step.inputs[0])?, self.range(step.inputs[1])?);
        let out = self.range(step.outputs[0])?;
        let ([x, angles], [out]) = self.arena.views([x, angles], [out]).ok_or_else(overlap)?;
        let (x, angles) = (floats(x), floats(angles));
        each_row(self.team, floats_mut(out), cols, |row, out| {
            out.copy_from_slice(&x[row * cols..][..cols]);
            rotate(isa, out, head_dim, style, weight, &angles[row * angle_cols..][..angle_cols]);
        });
        Ok(())
    }

    /// out = act(gate) · up, rounded to int8 where `quantise`.
    pub(super) fn act_mul(
        &mut self,
        kind: ActivationKind,
        gate: usize,
        up: usize,
        out: usize,
    ) -> Result<(), DeviceError> {
        let (isa, cols) = (self.isa, self.cols(gate));
        let quantise = self.elem(out) == Elem::Q8;
        let product = move |gate: &[f32], up: &[f32], out: &mut [f32]| match kind {
            ActivationKind::Silu => silu_mul_row(isa, gate, up, out),
            ActivationKind::GeluTanh => gelu_tanh_mul_row(isa, gate, up, out),
        };
        let (gate, up, out) = (self.range(gate)?, self.range(up)?, self.range(out)?);
        let ([gate, up], [out]) = self.arena.views([gate, up], [out]).ok_or_else(overlap)?;
        let (gate, up) = (floats(gate), floats(up));
        if quantise {
            let layout = QuantLayout::new(cols);
            let members = &mut self.scratch.members;
            each_row_with_room(self.team, members, out, layout.row_bytes(), |row, out, room| {
                let room = &mut room[..cols];
                product(&gate[row * cols..][..cols], &up[row * cols..][..cols], room);
                quantise_row(isa, layout, room, out);
            });
        } else {
            each_row(self.team, floats_mut(out), cols, |row, out| {
                product(&gate[row * cols..][..cols], &up[row * cols..][..cols], out);
            });
        }
        Ok(())
    }

    pub(super) fn gather_rows(&mut self, step: &Step) -> Result<(), DeviceError> {
        let (cols, wanted) = (self.cols(step.outputs[0]), self.io.logit_rows);
        let (x, out) = (self.range(step.inputs[0])?, self.range(step.outputs[0])?);
        let ([x], [out]) = self.arena.views([x], [out]).ok_or_else(overlap)?;
        let x = floats(x);
        each_row(self.team, floats_mut(out), cols, |row, out| {
            out.copy_from_slice(&x[wanted[row] as usize * cols..][..cols]);
        });
        Ok(())
    }

    pub(super) fn row_status(&mut self) {
        let vocab = self.plan.vocab_size;
        let logits = &*self.io.logits;
        each_row(self.team, self.io.row_status, 1, |row, status| {
            // A sum of zeros is zero; an infinity or a NaN anywhere makes it NaN. Unlike `all(is_finite)` it vectorises.
            let zeros: f32 =
                logits[row * vocab..][..vocab].chunks(64).map(|c| c.iter().map(|x| x * 0.0).sum::<f32>()).sum();
            status[0] = if zeros == 0.0 { RowStatus::Ok as u8 } else { RowStatus::NonFinite as u8 };
        });
    }
}

/// Head norm (if any) and rotation of one row in place. `angles` holds cosines, then sines.
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
