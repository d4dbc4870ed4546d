//! Writing keys and values, and attention over them.

use super::operands::{floats, floats_mut, overlap};
use super::rows::rotate;
use super::{Frame, MemberScratch, Scratch};
use crate::device::DeviceError;
use crate::device::cpu::arena::{Parts, Pieces};
use crate::device::cpu::attention::{Attention, AttentionScratch, AttentionShape};
use crate::device::cpu::kv::{KvRows, KvWrite, kv_write, kv_writes};
use crate::device::cpu::pool::Team;
use crate::graph::{self, NormSpec, RopeStyle, Step};

pub(super) fn shape_of(shape: &graph::AttentionShape) -> AttentionShape {
    AttentionShape {
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        scale: shape.scale,
        window: shape.window,
        softcap: None,
        schedules: None,
    }
}

impl Frame<'_> {
    /// Stores the rows' keys and values; keys are normed and rotated first where the operation is fused. Inputs are
    /// (k, v), or (k, angles, v) with a rotation.
    pub(super) fn kv_write(
        &mut self,
        layer: usize,
        rotation: Option<(usize, RopeStyle, Option<&NormSpec>)>,
        step: &Step,
    ) -> Result<(), DeviceError> {
        let (isa, kv, batch, team) = (self.isa, self.kv, self.batch, self.team);
        let (k, v) = (step.inputs[0], step.inputs[step.inputs.len() - 1]);
        let cols = self.cols(k);
        let angle_cols = if rotation.is_some() { self.cols(step.inputs[1]) } else { 0 };
        let angles = if rotation.is_some() { self.range(step.inputs[1])? } else { 0..0 };
        let rotation = rotation.map(|(head_dim, style, norm)| {
            (head_dim, style, norm.map(|norm| (self.weights.vector(norm.weight), norm.eps)))
        });
        let ([k, v, angles], []) =
            self.arena.views([self.range(k)?, self.range(v)?, angles], []).ok_or_else(overlap)?;
        let (k, v, angles) = (floats(k), floats(v), floats(angles));

        let pieces = Pieces::new(self.io.kv_pool, kv.bytes_per_block(), &mut self.scratch.claims);
        let rooms = Parts::rows(&mut self.scratch.members, 1, team.count(), 1);
        let all_heads = 0..kv.geometry().kv_heads;
        let layer_bytes = kv.layer_range(crate::kv_cache::BlockId(0), layer);
        team.run(&|member| {
            let mut room = rooms.claim(member.index());
            let room = &mut room.row_mut(0)[0].row[..cols];
            for write in kv_writes(batch, kv.geometry().block_size, member.index(), team.count()) {
                let block = &mut pieces.take(write.block.0 as usize)[layer_bytes.clone()];
                let Some((head_dim, style, norm)) = rotation else {
                    let rows = KvRows { k, k_stride: cols, v, v_stride: cols };
                    kv_write(isa, &kv, write, all_heads.clone(), rows, block);
                    continue;
                };
                for index in 0..write.rows {
                    let row = write.first_row + index;
                    room.copy_from_slice(&k[row * cols..][..cols]);
                    rotate(isa, room, head_dim, style, norm, &angles[row * angle_cols..][..angle_cols]);
                    let rows = KvRows { k: room, k_stride: cols, v: &v[row * cols..][..cols], v_stride: cols };
                    let one = KvWrite { first_row: 0, first_slot: write.first_slot + index, rows: 1, ..write };
                    kv_write(isa, &kv, one, all_heads.clone(), rows, block);
                }
            }
        });
        Ok(())
    }

    pub(super) fn attention(&mut self, op: &graph::AttentionShape, step: &Step) -> Result<(), DeviceError> {
        let shape = shape_of(op);
        let team = self.team;
        let width = shape.heads * shape.head_dim;
        let (q, out) = (self.range(step.inputs[0])?, self.range(step.outputs[0])?);
        let ([q], [out]) = self.arena.views([q], [out]).ok_or_else(overlap)?;
        let attention = Attention {
            isa: self.isa,
            shape,
            layout: self.kv,
            layer: op.layer,
            pool: self.io.kv_pool,
            rows: self.batch,
            q: floats(q),
            q_stride: width,
            sinks: None,
        };
        let Scratch { members, schedule, partials, .. } = &mut *self.scratch;
        // Layers of one window share a plan, but planning is cheap beside a layer and keeps no state between steps.
        schedule.plan(&shape, self.batch, self.kv.geometry().block_size);
        let schedule = &*schedule;
        if schedule.needs_merge() {
            let partial = shape.partial_len();
            let needed = schedule.bounds().last().copied().unwrap_or(0) * partial;
            if partials.len() < needed {
                partials.resize(needed, 0.0);
            }
            let partials = &mut partials[..needed];
            let parts = Parts::rows_at(partials, partial, schedule.bounds());
            each_member(team, members, |member, room| {
                let mut tile = parts.claim(member);
                let first = tile.first();
                attention.attend(schedule, member, room, &mut |piece, values| {
                    tile.row_mut(piece - first).copy_from_slice(values);
                });
            });
            let parts_out = Parts::rows_at(floats_mut(out), shape.piece_len(), schedule.merge_bounds());
            let partials = parts.read();
            each_member(team, members, |member, room| {
                let mut tile = parts_out.claim(member);
                let first = tile.first();
                attention.merge(schedule, member, partials, room, &mut |piece, values| {
                    tile.row_mut(piece - first).copy_from_slice(values);
                });
            });
        } else {
            let parts = Parts::rows_at(floats_mut(out), shape.piece_len(), schedule.bounds());
            each_member(team, members, |member, room| {
                let mut tile = parts.claim(member);
                let first = tile.first();
                attention.attend(schedule, member, room, &mut |piece, values| {
                    tile.row_mut(piece - first).copy_from_slice(values);
                });
            });
        }
        Ok(())
    }
}

/// Runs `body(member, its room)` on the team.
fn each_member(team: &Team, members: &mut [MemberScratch], body: impl Fn(usize, &mut AttentionScratch) + Sync) {
    let rooms = Parts::rows(members, 1, team.count(), 1);
    team.run(&|member| {
        let mut room = rooms.claim(member.index());
        if let Some(room) = &mut room.row_mut(0)[0].attention {
            body(member.index(), room);
        }
    });
}
