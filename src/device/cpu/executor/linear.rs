//! Executes matrix products with weights; each worker computes whole panels of output columns.

use super::group::GroupContext;
use super::launch::{floats, floats_mut};
use super::scratch::Continuation;
use crate::device::DeviceError;
use crate::device::cpu::Isa;
use crate::device::cpu::kernels::argmax::{Argmax, argmax_row};
use crate::device::cpu::kernels::float_rows::FloatRows;
use crate::device::cpu::kernels::matmul::{matmul_bf16, matmul_f32, matmul_q8};
use crate::device::cpu::kernels::q8_rows::{QuantLayout, QuantRows};
use crate::device::cpu::memory::{Partition, Tile};
use crate::device::cpu::thread_pool::split;
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use crate::graph::{ActivationKind, ActivationType, Elem, LinearPart, NO_TOKEN, RowStatus, Step};

/// Input rows of a product.
#[derive(Clone, Copy)]
enum Input<'a> {
    F32(FloatRows<'a>),
    BF16(FloatRows<'a, u16>),
    Q8(QuantRows<'a>),
}

impl<'a> Input<'a> {
    fn new(elem: Elem, bytes: &'a [u8], k: usize) -> Self {
        match elem {
            Elem::Q8 => Self::Q8(QuantRows::new(QuantLayout::new(k), bytes)),
            Elem::BF16 => Self::BF16(FloatRows::new(bytemuck::cast_slice(bytes), k, k)),
            _ => Self::F32(FloatRows::new(floats(bytes), k, k)),
        }
    }

    /// Computes a tile whose first column is the first of a panel.
    fn multiply(self, isa: Isa, w: &PackedMatrix, bias: Option<&[f32]>, out: &mut Tile<'_, f32>) {
        let first = out.first() / PANEL;
        let panels = first..first + out.cols().div_ceil(PANEL);
        match self {
            Self::F32(x) => matmul_f32(isa, x, w, bias, panels, out),
            Self::BF16(x) => matmul_bf16(isa, x, w, bias, panels, out),
            Self::Q8(x) => matmul_q8(isa, x, w, bias, panels, out),
        }
    }
}

impl<'a> GroupContext<'a> {
    fn input(&self, x: usize) -> Result<Input<'a>, DeviceError> {
        Ok(Input::new(self.elem(x), self.read(x)?, self.cols(x)))
    }

    pub(super) fn linear(
        &self,
        part: &LinearPart,
        x: usize,
        out: usize,
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let (isa, n) = (self.isa(), self.cols(out));
        let w = self.weights.matrix(part.weight);
        let bias = part.bias.map(|bias| self.weights.vector(bias));
        let x = self.input(x)?;
        let parts = Partition::columns(floats_mut(self.write(out)?), n, self.workers(), PANEL);
        then(&|worker, _| x.multiply(isa, w, bias, &mut parts.claim(worker.index())))
    }

    /// Computes the product and, while a worker's columns are in cache, each row's argmax over them.
    pub(super) fn linear_argmax(&self, part: &LinearPart, step: &Step) -> Result<(), DeviceError> {
        let (isa, workers) = (self.isa(), self.workers());
        let (out, best) = (step.outputs[0], step.outputs[1]);
        let (n, rows) = (self.cols(out), self.rows(out));
        let w = self.weights.matrix(part.weight);
        let bias = part.bias.map(|bias| self.weights.vector(bias));
        let x = self.input(step.inputs[0])?;
        let parts = Partition::columns(floats_mut(self.write(out)?), n, workers, PANEL);
        let mut lane = self.stream_scratch(step)?;
        lane.bests.clear();
        lane.bests.resize(rows * workers, Argmax::NONE);
        let bests = Partition::columns(&mut lane.bests, workers, workers, 1);
        self.start(usize::MAX, &|worker, _| {
            let (mut tile, mut bests) = (parts.claim(worker.index()), bests.claim(worker.index()));
            if tile.cols() == 0 {
                return;
            }
            x.multiply(isa, w, bias, &mut tile);
            for row in 0..tile.rows() {
                // The list has one column per worker.
                bests.row_mut(row)[0] = argmax_row(isa, tile.row(row), tile.first());
            }
        })?;
        let ids: &mut [u32] = bytemuck::cast_slice_mut(self.write(best)?);
        for (row, (id, bests)) in ids.iter_mut().zip(bests.read().chunks_exact(workers)).enumerate() {
            *id = bests.iter().fold(Argmax::NONE, |best, next| best.then(*next)).id;
            if *id == NO_TOKEN {
                self.flags().mark(self.launch.logit_rows[row] as usize, RowStatus::NonFinite);
            }
        }
        Ok(())
    }

    pub(super) fn swiglu_linear(
        &self,
        product: (ActivationKind, ActivationType),
        part: &LinearPart,
        scratch: usize,
        step: &Step,
    ) -> Result<(), DeviceError> {
        let (isa, out) = (self.isa(), step.outputs[0]);
        // The product is read where it was written, so one borrow serves both runs.
        let (elem, rows, k) = (self.elem(scratch), self.rows(scratch), self.cols(scratch));
        let scratch = self.write(scratch)?;
        self.act_mul_into(product, step, scratch, &mut |work| self.start(3 * rows * k, work))?;
        let w = self.weights.matrix(part.weight);
        let bias = part.bias.map(|bias| self.weights.vector(bias));
        let x = Input::new(elem, scratch, k);
        let parts = Partition::columns(floats_mut(self.write(out)?), self.cols(out), self.workers(), PANEL);
        self.start(usize::MAX, &|worker, _| x.multiply(isa, w, bias, &mut parts.claim(worker.index())))
    }

    pub(super) fn linear_multi(
        &self,
        parts: &[LinearPart],
        step: &Step,
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        match *step.outputs.as_slice() {
            [a] => self.linear(&parts[0], step.inputs[0], a, then),
            [a, b] => self.linear_many(parts, step, [a, b], then),
            [a, b, c] => self.linear_many(parts, step, [a, b, c], then),
            [a, b, c, d] => self.linear_many(parts, step, [a, b, c, d], then),
            _ => Err(super::launch::broken("more than 4 products of one input")),
        }
    }

    /// Computes several products of one input in one run: workers share the panels of all matrices evenly, as one list.
    fn linear_many<const N: usize>(
        &self,
        parts: &[LinearPart],
        step: &Step,
        outs: [usize; N],
        then: Continuation<'_>,
    ) -> Result<(), DeviceError> {
        let (isa, workers) = (self.isa(), self.workers());
        let widths = outs.map(|out| self.cols(out));
        let total: usize = widths.iter().map(|n| n.div_ceil(PANEL)).sum();
        let mut before = 0;
        let mut lane = self.stream_scratch(step)?;
        for (bounds, n) in lane.bounds.iter_mut().zip(widths) {
            bounds.clear();
            let panels = n.div_ceil(PANEL);
            bounds.extend((0..workers).map(|m| {
                let start = split(total, 1, workers, m).start.clamp(before, before + panels);
                ((start - before) * PANEL).min(n)
            }));
            bounds.push(n);
            before += panels;
        }
        let x = self.input(step.inputs[0])?;
        let mut written: [&mut [u8]; N] = std::array::from_fn(|_| Default::default());
        for (scratch, out) in written.iter_mut().zip(outs) {
            *scratch = self.write(out)?;
        }
        let bounds = &lane.bounds;
        let mut index = 0;
        let tiles = written.map(|out| {
            let tiles = Partition::columns_at(floats_mut(out), widths[index], &bounds[index]);
            index += 1;
            tiles
        });
        let weights = self.weights;
        then(&|worker, _| {
            for (tiles, part) in tiles.iter().zip(parts) {
                let mut tile = tiles.claim(worker.index());
                if tile.cols() > 0 {
                    let bias = part.bias.map(|bias| weights.vector(bias));
                    x.multiply(isa, weights.matrix(part.weight), bias, &mut tile);
                }
            }
        })
    }
}
