//! Executes KV-cache writes and attention.

use super::group::GroupContext;
use super::launch::{AttentionBuffers, broken, floats, floats_mut, overlap};
use super::row_ops::rotate;
use super::scratch::{Continuation, StreamScratch, WorkerScratch};
use crate::device::DeviceError;
use crate::device::cpu::kernels::attention::{Attention, AttentionDims, AttentionScratch};
use crate::device::cpu::kernels::cast::{F16_MAX, count_beyond};
use crate::device::cpu::kernels::kv_cache::{KvRows, KvWrite, kv_write, kv_writes};
use crate::device::cpu::memory::{DisjointChunks, Partition};
use crate::graph::{self, NormSpec, RopeStyle, Step};
use crate::kv_cache::KvDType;

pub(super) fn shape_of(shape: &graph::AttentionShape) -> AttentionDims {
    AttentionDims {
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        scale: shape.scale,
        window: shape.window,
        softcap: None,
        schedules: shape.schedules,
    }
}

impl GroupContext<'_> {
    /// Stores the rows' keys and values. In the fused operation, keys are first normalized and rotated. Inputs are (k,
    /// v), or (k, angles, v) with a rotation.
    pub(super) fn kv_write(
        &self,
        layer: usize,
        rotation: Option<(usize, RopeStyle, Option<&NormSpec>)>,
        step: &Step,
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let (isa, kv, batch) = (self.isa(), self.kv, self.launch.batch);
        let (k, v) = (step.inputs[0], step.inputs[step.inputs.len() - 1]);
        let cols = self.cols(k);
        let (angle_cols, angles) = match rotation {
            Some(_) => (self.cols(step.inputs[1]), floats(self.read(step.inputs[1])?)),
            None => (0, [].as_slice()),
        };
        let rotation = rotation.map(|(head_dim, style, norm)| {
            (head_dim, style, norm.map(|norm| (self.weights.vector(norm.weight), norm.eps)))
        });
        let (k, v) = (floats(self.read(k)?), floats(self.read(v)?));
        let pool = self.kv_pool.write(0..self.launch.pool_bytes).ok_or_else(overlap)?;
        let mut lane = self.stream_scratch(step)?;
        let StreamScratch { claims, .. } = &mut *lane;
        let pieces = DisjointChunks::new(pool, kv.bytes_per_block(), claims);
        let layer_bytes = kv.layer_range(crate::kv_cache::BlockId(0), layer);
        let may_overflow = kv.geometry().dtype == KvDType::F16;
        let flags = self.flags();
        let look = |row: usize, k: &[f32], v: &[f32]| {
            if may_overflow {
                let beyond = count_beyond(isa, k, F16_MAX) + count_beyond(isa, v, F16_MAX);
                flags.store_overflow(&step.op, row, beyond);
            }
        };
        then(&|worker, scratch| {
            let scratch = &mut scratch.row[..cols];
            for write in kv_writes(batch, kv.geometry().block_size, worker.index(), worker.count()) {
                let block = &mut pieces.take(write.block.0 as usize)[layer_bytes.clone()];
                let Some((head_dim, style, norm)) = rotation else {
                    for row in write.first_row..write.first_row + write.rows {
                        look(row, &k[row * cols..][..cols], &v[row * cols..][..cols]);
                    }
                    let rows = KvRows { k, k_stride: cols, v, v_stride: cols };
                    kv_write(isa, &kv, write, 0..kv.heads(), rows, block);
                    continue;
                };
                for index in 0..write.rows {
                    let row = write.first_row + index;
                    scratch.copy_from_slice(&k[row * cols..][..cols]);
                    rotate(isa, scratch, head_dim, style, norm, &angles[row * angle_cols..][..angle_cols]);
                    look(row, scratch, &v[row * cols..][..cols]);
                    let rows = KvRows { k: scratch, k_stride: cols, v: &v[row * cols..][..cols], v_stride: cols };
                    let one = KvWrite { first_row: 0, first_slot: write.first_slot + index, rows: 1, ..write };
                    kv_write(isa, &kv, one, 0..kv.heads(), rows, block);
                }
            }
        })
    }

    pub(super) fn attention(&self, op: &graph::AttentionShape, step: &Step) -> Result<(), DeviceError> {
        let shape = shape_of(op);
        let width = shape.heads * shape.head_dim;
        let (q, out) = (self.read(step.inputs[0])?, floats_mut(self.write(step.outputs[0])?));
        let pool = self.kv_pool.read(0..self.launch.pool_bytes).ok_or_else(overlap)?;
        let batch = self.launch.batch;
        let attention = Attention {
            isa: self.isa(),
            shape,
            layout: self.kv,
            layer: op.layer,
            pool,
            rows: batch,
            q: floats(q),
            q_stride: width,
            sinks: None,
        };
        let mut scratch = self.scratch.attention.try_borrow_mut().map_err(|_| broken("attention within attention"))?;
        let AttentionBuffers { schedule, partials } = &mut *scratch;
        // Layers with the same window could share a schedule, but computing it is cheap compared with a layer and
        // leaves no state between steps.
        schedule.plan(&shape, batch, self.kv.geometry().block_size);
        let schedule = &*schedule;
        if schedule.needs_merge() {
            let partial = shape.partial_len();
            let needed = schedule.bounds().last().copied().unwrap_or(0) * partial;
            if partials.len() < needed {
                partials.resize(needed, 0.0);
            }
            let partials = &mut partials[..needed];
            let parts = Partition::rows_at(partials, partial, schedule.bounds());
            self.on_each_worker(&|worker, scratch| {
                let mut tile = parts.claim(worker);
                let first = tile.first();
                attention.attend(schedule, worker, scratch, &mut |piece, values| {
                    tile.row_mut(piece - first).copy_from_slice(values);
                });
            })?;
            let parts_out = Partition::rows_at(out, shape.piece_len(), schedule.merge_bounds());
            let partials = parts.read();
            self.on_each_worker(&|worker, scratch| {
                let mut tile = parts_out.claim(worker);
                let first = tile.first();
                attention.merge(schedule, worker, partials, scratch, &mut |piece, values| {
                    tile.row_mut(piece - first).copy_from_slice(values);
                });
            })?;
        } else {
            let parts = Partition::rows_at(out, shape.piece_len(), schedule.bounds());
            self.on_each_worker(&|worker, scratch| {
                let mut tile = parts.claim(worker);
                let first = tile.first();
                attention.attend(schedule, worker, scratch, &mut |piece, values| {
                    tile.row_mut(piece - first).copy_from_slice(values);
                });
            })?;
        }
        Ok(())
    }

    /// Runs `body(worker, scratch)` on the thread pool.
    fn on_each_worker(&self, body: &(dyn Fn(usize, &mut AttentionScratch) + Sync)) -> Result<(), DeviceError> {
        self.start(usize::MAX, &|worker, scratch: &mut WorkerScratch| {
            if let Some(scratch) = &mut scratch.attention {
                body(worker.index(), scratch);
            }
        })
    }
}
