//! Products with weights: members take whole panels of output columns.

use super::Frame;
use super::operands::{floats, floats_mut, overlap};
use crate::device::DeviceError;
use crate::device::cpu::Isa;
use crate::device::cpu::arena::{Parts, Tile};
use crate::device::cpu::matmul::{FloatRows, matmul_f32, matmul_q8};
use crate::device::cpu::pack::{PANEL, PackedMatrix};
use crate::device::cpu::pool::split;
use crate::device::cpu::quant::{QuantLayout, QuantRows};
use crate::graph::{Elem, LinearPart, Step};

/// Rows that a product reads.
#[derive(Clone, Copy)]
enum Input<'a> {
    F32(FloatRows<'a>),
    Q8(QuantRows<'a>),
}

impl<'a> Input<'a> {
    fn new(elem: Elem, bytes: &'a [u8], k: usize) -> Self {
        match elem {
            Elem::Q8 => Self::Q8(QuantRows::new(QuantLayout::new(k), bytes)),
            _ => Self::F32(FloatRows::new(floats(bytes), k, k)),
        }
    }

    /// Fills a tile whose columns begin at a panel.
    fn multiply(self, isa: Isa, w: &PackedMatrix, bias: Option<&[f32]>, out: &mut Tile<'_, f32>) {
        let first = out.first() / PANEL;
        let panels = first..first + out.cols().div_ceil(PANEL);
        match self {
            Self::F32(x) => matmul_f32(isa, x, w, bias, panels, out),
            Self::Q8(x) => matmul_q8(isa, x, w, bias, panels, out),
        }
    }
}

impl Frame<'_> {
    pub(super) fn linear(&mut self, part: &LinearPart, x: usize, out: usize) -> Result<(), DeviceError> {
        let (isa, n) = (self.isa, self.cols(out));
        let (elem, k) = (self.elem(x), self.cols(x));
        let w = self.weights.matrix(part.weight);
        let bias = part.bias.map(|bias| self.weights.vector(bias));
        let x = self.range(x)?;
        let (x, out): (&[u8], &mut [f32]) = if self.is_logits(out) {
            let ([x], []) = self.arena.views([x], []).ok_or_else(overlap)?;
            (x, self.io.logits)
        } else {
            let out = self.range(out)?;
            let ([x], [out]) = self.arena.views([x], [out]).ok_or_else(overlap)?;
            (x, floats_mut(out))
        };
        let x = Input::new(elem, x, k);
        let parts = Parts::columns(out, n, self.team.count(), PANEL);
        self.team.run(&|member| x.multiply(isa, w, bias, &mut parts.claim(member.index())));
        Ok(())
    }

    pub(super) fn linear_multi(&mut self, parts: &[LinearPart], step: &Step) -> Result<(), DeviceError> {
        match *step.outputs.as_slice() {
            [a, b] => self.linear_many(parts, step.inputs[0], [a, b]),
            [a, b, c] => self.linear_many(parts, step.inputs[0], [a, b, c]),
            _ => {
                for (part, &out) in parts.iter().zip(&step.outputs) {
                    self.linear(part, step.inputs[0], out)?;
                }
                Ok(())
            }
        }
    }

    /// Several products of one input in one run: the panels of all are one list that members share evenly.
    fn linear_many<const N: usize>(
        &mut self,
        parts: &[LinearPart],
        x: usize,
        outs: [usize; N],
    ) -> Result<(), DeviceError> {
        let (isa, members) = (self.isa, self.team.count());
        let (elem, k) = (self.elem(x), self.cols(x));
        let widths = outs.map(|out| self.cols(out));
        let mut ranges: [_; N] = std::array::from_fn(|_| 0..0);
        for (range, out) in ranges.iter_mut().zip(outs) {
            *range = self.range(out)?;
        }
        let x = self.range(x)?;
        let total: usize = widths.iter().map(|n| n.div_ceil(PANEL)).sum();
        let mut before = 0;
        for (bounds, n) in self.scratch.bounds.iter_mut().zip(widths) {
            bounds.clear();
            let panels = n.div_ceil(PANEL);
            bounds.extend((0..members).map(|m| {
                let start = split(total, 1, members, m).start.clamp(before, before + panels);
                ((start - before) * PANEL).min(n)
            }));
            bounds.push(n);
            before += panels;
        }
        let ([x], outs) = self.arena.views([x], ranges).ok_or_else(overlap)?;
        let x = Input::new(elem, x, k);
        let bounds = &self.scratch.bounds;
        let mut index = 0;
        let tiles = outs.map(|out| {
            let tiles = Parts::columns_at(floats_mut(out), widths[index], &bounds[index]);
            index += 1;
            tiles
        });
        let weights = self.weights;
        self.team.run(&|member| {
            for (tiles, part) in tiles.iter().zip(parts) {
                let mut tile = tiles.claim(member.index());
                if tile.cols() > 0 {
                    let bias = part.bias.map(|bias| weights.vector(bias));
                    x.multiply(isa, weights.matrix(part.weight), bias, &mut tile);
                }
            }
        });
        Ok(())
    }
}
